"""Child processes: tied to their parent (`tether`), spoken to (`frames`), and ended (`ending`).

All modules are light: workers that run users' functions import them, too.
"""
