"""What is learned: of each task a half without torch (`Task`) and one with it (`TrainingTask`), see base.py."""
