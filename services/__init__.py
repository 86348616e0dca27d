"""The servers of Troupe. None imports another; they share the chassis and protobuf contracts."""

from troupe.installation import refuse_other_troupe

# Also here: the other project's `troupe/__init__.py` replaces ours if it is installed later.
refuse_other_troupe()
