"""What a rank knows of the others: who it is, where they meet, who lives, who asked to stop, who is lost."""
