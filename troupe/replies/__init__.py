"""What is in a model's reply: `reading` finds thoughts, tool calls, JSON and code blocks; `formats`
lists how families of models write them."""
