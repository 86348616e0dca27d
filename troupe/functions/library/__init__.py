"""Functions that are ready to use: tools of coding agents (`code`), a model that judges (`judge`).

tools:
  run_pytest: {entrypoint: "troupe.functions.library.code:run_pytest"}
rewards:
  judge: {entrypoint: "troupe.functions.library.judge:judge", arguments: {...}}
"""
