#!/bin/sh
# make_venv.sh FOLDER CONSTRAINTS: makes a virtual environment of the first interpreter that magicdec supports and for
# which the index has the constraints' torch: $PYTHON where it is set, otherwise python3, then the newest found.
# Nothing is downloaded: where none will do, one line says why.
set -eu
folder=$1
torch=$(sed -n 's/^torch==//p' "$2")

# An environment that was there before is not removed: the index may only be out of reach.
before=""
[ -e "$folder" ] && before=yes

candidates=${PYTHON:-}
if [ -z "$candidates" ]; then
  candidates=python3
  for supported in 3.14 3.13 3.12 3.11; do
    candidates="$candidates python$supported $(echo "${PYENV_ROOT:-$HOME/.pyenv}/versions/$supported".*/bin/python)"
  done
fi

found=""
refused=""
for python in $candidates; do
  # A shim of pyenv is on PATH for each version, whether it runs or not.
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case " $refused " in
    *" $version "*) continue ;;
  esac
  refused="$refused $version"
  case $version in
    3.11 | 3.12 | 3.13 | 3.14) ;;
    *)
      found="$found; $python is Python $version"
      continue
      ;;
  esac
  "$python" -m venv "$folder"
  # Lists the wheels for this interpreter and this machine from the index's page alone.
  wheels=$("$folder/bin/python" -m pip index versions torch --disable-pip-version-check --only-binary :all: \
    ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} 2>&1) || wheels="none"
  case $wheels in
    *"$torch"*) exit 0 ;;
  esac
  [ -n "$before" ] || rm -rf "$folder"
  found="$found; for $python, Python $version, the package index has no wheel of torch $torch"
done
found=${found#; }
echo "magicdec needs Python 3.11 to 3.14 with a wheel of torch $torch: ${found:-${PYTHON:-python3} does not run}." \
  "Install one, or name it: make PYTHON=/path/to/python3.12" >&2
exit 1
