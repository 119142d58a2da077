"""Write the model of a run that was killed, from its last save.

    python -m tools.save_model runs/math              writes runs/math/model
"""
import argparse
from pathlib import Path

import torch

import train_math


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="the --output_dir of a run")
    folder = parser.parse_args(argv).folder
    with train_math.exits_with(f"{folder}/state.pt"):
        state = torch.load(folder / "state.pt", map_location="cpu")
        name = state["rows"][0]["settings"]["model"]
    with train_math.exits_with(f"--model {name}"):
        model, tokenizer = train_math.load(name, "cpu")
    with train_math.exits_with(f"the weights of this run do not fit the model {name}"):
        model.load_state_dict(state["model"])
    with train_math.locked(folder):
        for part in model, tokenizer:
            part.save_pretrained(folder / "model")
    print(f"{folder}/model is the model after step {state['rows'][-1]['step']}")


if __name__ == "__main__":
    main()
