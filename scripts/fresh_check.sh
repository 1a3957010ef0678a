#!/usr/bin/env bash
# Run the README's two commands as a new user would: a fresh Debian sid with Python, make and git only, an ordinary user
# with an empty HOME, a clone of the committed state. Needs root and debootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "$(id -u)" = 0 ] || { echo "fresh-check: not root, which debootstrap and chroot need. Run it with sudo" >&2; exit 1; }
command -v debootstrap > /dev/null || { echo "fresh-check: debootstrap is not installed. Run: apt-get install debootstrap" >&2; exit 1; }
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
root=$(mktemp -d "${TMPDIR:-/tmp}/spile-fresh.XXXXXX")
# The mounts live in a namespace of their own, so nothing is left mounted when this script ends or is killed.
chmod 755 "$root"  # The ordinary user enters it.
trap 'rm -rf --one-file-system "$root"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates sid "$root" "$mirror" > "$root.log" 2>&1 ||
  { tail -n 5 "$root.log" >&2; echo "fresh-check: debootstrap failed; its whole output is in $root.log" >&2; exit 1; }
rm -f "$root.log"
version=$(chroot "$root" python3 -c 'import sys; print(sys.version_info >= (3, 14), sys.version.split()[0])')
[ "${version% *}" = True ] || { echo "fresh-check: sid's python3 is ${version#* }, older than 3.14" >&2; exit 1; }
echo "fresh-check: Debian sid, Python ${version#* }"

# How this machine reaches the package registry: names, certificates and pip's own settings.
cp -L /etc/resolv.conf /etc/hosts "$root/etc/"
[ ! -e /etc/ssl/certs/ca-certificates.crt ] || cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp -L /etc/pip.conf "$root/etc/"
settings=()
while IFS= read -r line; do settings+=("$line"); done < <(env | grep -E '^(PIP_(CERT|INDEX_URL|EXTRA_INDEX_URL|DEFAULT_TIMEOUT)|(HTTPS?|NO)_PROXY|https?_proxy|no_proxy)=' || true)

chroot "$root" useradd --create-home --skel /nonexistent user
git clone --quiet --no-hardlinks . "$root/home/user/spile"
chroot "$root" chown -R user:user /home/user
export root
unshare --mount bash -euo pipefail -c '
  mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"
  exec chroot --userspec=user:user "$root" env -i HOME=/home/user USER=user LANG=C.UTF-8 PATH=/usr/bin:/bin "$@" \
    bash -euo pipefail -c "cd ~/spile; ls -A ~ | grep -qx spile; make demo; make test"' _ "${settings[@]}"
echo "fresh-check: make demo and make test pass on a fresh machine"
