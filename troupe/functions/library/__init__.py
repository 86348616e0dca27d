"""Predefined functions: tools of coding agents (`code`), a judging model (`judge`), and others.

tools:
  run_pytest: {entrypoint: "troupe.functions.library.code:run_pytest"}
rewards:
  judge: {entrypoint: "troupe.functions.library.judge:judge", arguments: {...}}
"""
