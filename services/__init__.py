"""The servers of Troupe. None imports another; they share the chassis and protobuf contracts."""
