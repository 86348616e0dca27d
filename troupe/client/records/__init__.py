"""The frozen records that the SDK returns, by topic; `troupe.client` names the public ones."""
