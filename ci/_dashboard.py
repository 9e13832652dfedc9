"""Changes to asv's dashboard: no external scripts, readable names, and Tandem's first page as index.html.

asv's page loads its scripts from four hosts and is empty without them. So the scripts are fetched from the npm
registry, by name and version, when a dashboard is first drawn on a machine with npm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from _environment import say

# npm package and file for the end of each address in asv's page. Some minified files are replaced by their sources.
SCRIPTS = {
    "jquery-3.3.1.min.js": ("jquery@3.3.1", "dist/jquery.min.js"),
    "jquery.flot.min.js": ("flot@0.8.3", "jquery.flot.js"),
    "jquery.flot.time.min.js": ("flot@0.8.3", "jquery.flot.time.js"),
    "jquery.flot.selection.min.js": ("flot@0.8.3", "jquery.flot.selection.js"),
    "jquery.flot.categories.min.js": ("flot@0.8.3", "jquery.flot.categories.js"),
    "jquery.flot.orderBars.js": ("flot-orderbars@1.0.0", "js/jquery.flot.orderBars.js"),
    "stupidtable.min.js": ("stupid-table-plugin@1.1.3", "stupidtable.min.js"),
    "md5.min.js": ("blueimp-md5@2.19.0", "js/md5.min.js"),
    "bootstrap.min.js": ("bootstrap@3.1.1", "dist/js/bootstrap.min.js"),
    "bootstrap.min.css": ("bootstrap@3.1.1", "dist/css/bootstrap.min.css"),
}
DEADLINE_S = 120
ASV_PAGE = "asv.html"
# Replacements in asv's files: readable names of benchmark groups and benchmarks.
_GROUP = ".replace(/^bench_/, '').replace(/_/g, ' ')"
REPLACEMENTS = {
    "summarygrid.js": {"'<h1>' + group + '</h1>'": f"'<h1>' + group{_GROUP} + '</h1>'"},
    "graphdisplay.js": {
        "caret-right\"/> ' + parts[j] +": f"caret-right\"/> ' + parts[j]{_GROUP} +",
        '$("#title").text(bm_name)': '$("#title").text($.asv.main_json.benchmarks[bm_name].pretty_name)',
    },
}
_BRAND = re.compile(r'<a href="https://github.com/airspeed-velocity/asv/".*?unladen', re.DOTALL)


def finish(html: Path, cache: Path) -> None:
    """Move asv's page to asv.html and edit its texts. The first page is drawn afterwards."""
    make_self_contained(html, cache)
    for file, replacements in REPLACEMENTS.items():
        text = (html / file).read_text()
        for old, new in replacements.items():
            # asv is pinned, so this can only fail when its version is raised.
            if old not in text:
                raise RuntimeError(f"{file} of this asv lacks {old}; adapt REPLACEMENTS in ci/_dashboard.py")
            text = text.replace(old, new)
        (html / file).write_text(text)
    page = (html / "index.html").read_text()
    page = _BRAND.sub('<a href="index.html" class="navbar-link">Overview</a> of', page)
    (html / ASV_PAGE).write_text(
        page.replace("<title>airspeed velocity</title>", "<title>Tandem: all benchmarks</title>")
    )
    (html / "index.html").unlink()


def make_self_contained(html: Path, cache: Path) -> None:
    index = html / "index.html"
    page = index.read_text()
    addresses = re.findall(r'(?:src|href)="(https://[^"]+\.(?:js|css))"', page)
    unknown = [address for address in addresses if address.rsplit("/", 1)[1] not in SCRIPTS]
    if unknown or not _fetch(cache):
        reason = f"unknown scripts: {', '.join(unknown)}" if unknown else "npm could not fetch the scripts"
        say(f"dashboard: asv's pages need internet access, the first page does not ({reason})")
        return
    (html / "vendor").mkdir(exist_ok=True)
    for address in addresses:
        file = address.rsplit("/", 1)[1]
        (html / "vendor" / file).write_bytes(_member(cache, *SCRIPTS[file]))
        page = page.replace(address, f"vendor/{file}")
    # Remove the checksums, which are those of the files on the four hosts.
    index.write_text(re.sub(r'\s(?:integrity|crossorigin|referrerpolicy)="[^"]*"', "", page))


def _fetch(cache: Path) -> bool:
    """Fetch missing packages from npm. Return whether all packages are in the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    missing = sorted({package for package, _ in SCRIPTS.values() if not _archive(cache, package).exists()})
    npm = shutil.which("npm")
    if missing and npm is None:
        return False
    if missing:
        say(f"dashboard: fetching {', '.join(missing)}")
        command = [npm, "pack", "--silent", "--pack-destination", str(cache), *missing]
        try:
            subprocess.run(command, cwd=cache, timeout=DEADLINE_S, check=True, stdout=subprocess.DEVNULL)
        except subprocess.SubprocessError:
            return False
    return all(_archive(cache, package).exists() for package, _ in SCRIPTS.values())


def _archive(cache: Path, package: str) -> Path:
    return cache / f"{package.replace('@', '-')}.tgz"


def _member(cache: Path, package: str, path: str) -> bytes:
    with tarfile.open(_archive(cache, package)) as archive:
        file = archive.extractfile(f"package/{path}")
        assert file is not None, f"{package} has no file {path}"
        return file.read()
