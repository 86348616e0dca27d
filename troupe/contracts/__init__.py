"""Names and files that several processes must write alike. Modules of names import nothing, because
workflows and workers of reward functions import them, too."""
