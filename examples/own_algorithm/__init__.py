"""A loss, an advantage and a correction of one's own: functions.py, and the job that uses them."""
