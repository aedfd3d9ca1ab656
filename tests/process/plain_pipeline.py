"""Run by test_equality in a process of its own: plain diffusers, with nothing of diffcluster.

    python plain_pipeline.py MODEL_DIRECTORY CASES.json FOLDER

CASES.json is a list of the pipeline's keyword arguments, each with a `seed`; picture k is written to FOLDER/k.npy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusionPipeline


def main(model: str, cases: str, folder: str) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    for number, case in enumerate(json.loads(Path(cases).read_text())):
        generator = torch.Generator("cpu").manual_seed(case.pop("seed"))
        image = pipeline(**case, generator=generator).images[0]
        np.save(Path(folder) / f"{number}.npy", np.asarray(image.convert("RGB")))


if __name__ == "__main__":
    main(*sys.argv[1:])
