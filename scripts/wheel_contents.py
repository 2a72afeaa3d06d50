"""Compare a wheel with the source tree: every file under src/regard that git would keep, and the compiled part."""

import pathlib
import subprocess
import sys
import zipfile


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/regard"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    expected = {
        str(pathlib.PurePosixPath(name).relative_to("src")) for name in listed if pathlib.Path(name).exists()
    }
    expected.add("regard/kernels/_native.dylib" if sys.platform == "darwin" else "regard/kernels/_native.so")
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("regard/")}
    for name in sorted(expected - packed):
        print(f"wheel_contents: missing from the wheel: {name}", file=sys.stderr)
    for name in sorted(packed - expected):
        print(f"wheel_contents: in the wheel, not in the tree: {name}", file=sys.stderr)
    print(f"wheel_contents: {len(packed)} files in {pathlib.Path(sys.argv[1]).name}")
    return 0 if expected == packed else 1


if __name__ == "__main__":
    sys.exit(main())
