"""A custom loss, advantage and correction: functions.py, and the job that uses it."""
