"""Run the command line; where a package that it needs is missing, name it and the command to install it."""

import json
import sys
from dataclasses import asdict


def main() -> None:
    """Run the command line."""
    try:
        from brats_seg.cli import main as run

        run()
    except ModuleNotFoundError as error:
        from brats_seg.doctor import package_finding

        finding = package_finding()
        if finding.status == "ok":
            raise
        if sys.argv[1:2] == ["doctor"] and "--json" in sys.argv:
            print(json.dumps({"version": "", "can_work": False, "findings": [asdict(finding)]}))
        else:
            print(f"error: {error}; {finding.found}\n    {finding.remedy}", file=sys.stderr)
        sys.exit(3)


if __name__ == "__main__":
    main()
