"""Notes the losses and gradient norms that transformers' Trainer, and trainers based on it, log."""

from recording import Recording
from transformers import TrainerCallback


class Noting(TrainerCallback):
    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def on_log(self, args, state, control, logs=None, **kwargs):
        for key in ("loss", "grad_norm"):
            if key in (logs or {}):
                self.recording.note(key, float(logs[key]))
