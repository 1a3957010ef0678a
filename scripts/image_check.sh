#!/usr/bin/env bash
# Builds the image for real where no container engine runs, and tries it: make image-check (as root; buildah, debootstrap).
#   IMAGE_CHECK_MIRROR   Debian's mirror, where the default one is out of reach
#   IMAGE_CHECK_FLAGS    more flags for buildah's build, such as --volume /etc/pip.conf:/etc/pip.conf:ro
#   IMAGE_CHECK_FOLDER   where base and image are kept between checks [default: a temporary folder]
set -euo pipefail
cd "$(dirname "$0")/.."
for program in buildah debootstrap; do
  command -v $program > /dev/null || { echo "no $program: apt-get install buildah debootstrap" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "image-check needs root, for chroot" >&2; exit 2; }
target="${1:-cpu}"
base="$(sed -n 's/^ARG BASE=\([^@]*\).*/\1/p' Dockerfile)"
folder="${IMAGE_CHECK_FOLDER:-$(mktemp -d)}"
mkdir -p "$folder/run"
[ -n "${IMAGE_CHECK_FOLDER:-}" ] || trap 'rm -rf "$folder"' EXIT
image() { buildah --root "$folder/storage" --runroot "$folder/run" --storage-driver vfs "$@"; }

# A base of the name that the Dockerfile asks for: Debian's own Python instead of the one compiled for that image.
if ! image inspect "docker.io/library/$base" > /dev/null 2>&1; then
  [ -f "$folder/base/etc/debian_version" ] || debootstrap --variant=minbase \
    --include=python3,python3-venv,ca-certificates bookworm "$folder/base" ${IMAGE_CHECK_MIRROR:+"$IMAGE_CHECK_MIRROR"} > "$folder/debootstrap.log"
  rm -rf "$folder"/base/var/cache/apt "$folder"/base/var/lib/apt/lists
  container="$(image from scratch)"
  image add --quiet "$container" "$folder/base" / > /dev/null
  image commit --quiet "$container" "docker.io/library/$base" > /dev/null
  image rm "$container" > /dev/null
fi
# No --layers: this storage copies the whole root for each.
# shellcheck disable=SC2086
image build --isolation chroot --pull-never --build-arg "BASE=$base" --target "$target" --tag "spile:check-$target" ${IMAGE_CHECK_FLAGS:-} .

container="$(image from --pull-never "spile:check-$target")"
trap 'image rm "$container" > /dev/null; [ -n "${IMAGE_CHECK_FOLDER:-}" ] || rm -rf "$folder"' EXIT
inside() { image run --isolation chroot "$container" -- "$@"; }
user="$(inside id -u)"
[ "$user" = 1000 ] || { echo "image-check: the image's user is '$user', expected 1000" >&2; exit 1; }
inside spile --version
inside spile extract
inside spile verify activations
inside python3 -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(n) for n in ("pytest", "moto", "ruff", "pip")))' \
  || { echo "image-check: developers' tools are in the image" >&2; exit 1; }
size="$(du -sm "$(image mount "$container")" | cut -f1)"
echo "image-check: $target builds, and as user 1000 the demo and spile verify pass; $size MB unpacked"
