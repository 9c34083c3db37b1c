"""Arguments of `python -m flashq`, and which module answers them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import flashq
from flashq.cli.output import output_file


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashq", description="flashq: attention for inference as PyTorch custom ops."
    )
    parser.add_argument("--version", action="version", version=flashq.__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what is installed, what this machine has, and what is missing")
    selftest = commands.add_parser("selftest", help="check every op against its eager definition, in seconds")
    selftest.add_argument("--json", type=output_file, metavar="FILE", help="write the results there, too")
    demo = commands.add_parser(
        "demo", help="error, size and speed of the 16-bit and 4-bit caches on keys and values of real models"
    )
    demo.add_argument(
        "--model",
        action="store_true",
        help="only the language model, which runs by default where its weights are installed",
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    demo.add_argument(
        "--plot", type=output_file, metavar="FILE.png", help="draw the figures, in any format that matplotlib writes"
    )
    demo.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there, too")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 where a self-test failed, 2 where something needed is not there."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.command == "info":
        from flashq.cli import info

        return info.run()
    if options.command == "selftest":
        from flashq.cli import selftest

        return selftest.run(json_path=options.json)
    if options.model and options.plot:
        parser.error("--plot draws the layers, which --model leaves out")
    from flashq.cli import demo

    return demo.run(device=options.device, plot=options.plot, json_path=options.json, model_only=options.model)
