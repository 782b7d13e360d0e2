"""What a user calls: attach, the session itself, what it watches, and how it ends."""
