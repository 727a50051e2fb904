"""The device that networks run on: precision, memory, sliding windows and stored weights."""
