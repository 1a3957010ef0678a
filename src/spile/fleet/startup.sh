#!/bin/bash
# The script that a machine of a spile fleet runs at boot. It can also set up a bare machine in one line:
#
#   bash startup.sh --home gs://bucket/fleet/NAME --node tpu-us-central1-a-0 [--zone Z] [--host N] [--pin SHA256] [--force] [--install-only]
#
# It finds or installs a recent Python, installs the fleet's wheel, checks that JAX sees the chips, and runs the agent
# under systemd as its own user, so that the worker resumes after every boot. Flags that are not given come from the
# machine's metadata. --force installs again. From the bucket it uses only the fleet.json whose sha256 is in the machine's
# metadata (or in --pin), and the files whose sha256 is in that fleet.json.
set -Eeuo pipefail
umask 077  # fleet.json may contain secrets, and logs may quote them.

meta() { curl -fsS -m 10 -H 'Metadata-Flavor: Google' "http://${GCE_METADATA_HOST:-169.254.169.254}/computeMetadata/v1/$1"; }
# Like meta, but an absent value is empty; it fails only without any answer. A machine with chips tries for about a minute:
# if hosts of a slice took a missing answer for an absent value, each of them would assume that it is the first host.
tries=1
for each in "${SPILE_DEVICES:-/dev}"/accel[0-9]* "${SPILE_DEVICES:-/dev}"/vfio/[0-9]*; do [ ! -e "$each" ] || tries="${SPILE_TRIES:-10}"; done
ask() {
  local try said
  for ((try = 1; ; try++)); do
    said="$(curl -sS -m 10 -w '\n%{http_code}' -H 'Metadata-Flavor: Google' \
      "http://${GCE_METADATA_HOST:-169.254.169.254}/computeMetadata/v1/$1")" || true
    case "${said##*$'\n'}" in
      200) printf '%s' "${said%$'\n'*}"; return 0 ;;
      404) return 0 ;;
    esac
    [ "$try" -lt "$tries" ] || return 1
    sleep "$((try < 5 ? try : 5))"
  done
}
home='' node='' zone='' host='' pin='' force='' install_only=''
while [ $# -gt 0 ]; do
  case "$1" in
    --home) home="$2"; shift ;;
    --node) node="$2"; shift ;;
    --zone) zone="$2"; shift ;;
    --host) host="$2"; shift ;;
    --pin) pin="$2"; shift ;;
    --force) force=1 ;;
    --install-only) install_only=1 ;;
    *) echo "startup.sh: unknown flag $1: expected --home, --node, --zone, --host, --pin or --force" >&2; exit 2 ;;
  esac
  shift
done
by_hand="$home"
home="${home:-$(ask instance/attributes/spile-home || true)}"
node="${node:-$(ask instance/attributes/spile-node || true)}"
if [ -z "$home" ] || [ -z "$node" ]; then
  echo "startup.sh: no assignment: expected the metadata spile-home and spile-node, or --home and --node" >&2
  exit 2
fi
if [ -z "$host" ] && ! host="$(ask instance/attributes/agent-worker-number)" && [ "$tries" != 1 ]; then
  echo "startup.sh: the metadata server does not say which host of its slice this is: expected agent-worker-number, found no answer; boot again, or give --host" >&2
  exit 1
fi
host="${host:-0}"
zone="${zone:-$(ask instance/zone 2>/dev/null | sed 's|.*/||' || true)}"
place="${SPILE_HOME:-/opt/spile}"
units="${SPILE_UNIT_DIR:-/etc/systemd/system}"
mkdir -p "$place" "$units"
log="$place/startup.log"
assignment="$place/fleet.json"  # Reports take the name of the deployment from this file.
exec > >(tee -a "$log") 2>&1
echo "spile: $node, host $host, in ${zone:-an unknown zone}; assignment in $home"

# -- access to the bucket without our own Python: plain requests with the machine's token -------------------------------
storage="${STORAGE_EMULATOR_HOST:-https://storage.googleapis.com}"
token() { [ -n "${STORAGE_EMULATOR_HOST:-}" ] && echo none || meta instance/service-accounts/default/token | sed 's/.*"access_token" *: *"\([^"]*\)".*/\1/'; }
# The header goes through a pipe, because every user of the machine can read a command line.
bearer() { printf 'header = "Authorization: Bearer %s"\n' "$(token)"; }
escaped() { printf '%s' "$1" | sed 's|%|%25|g; s|/|%2F|g; s|+|%2B|g; s| |%20|g'; }
fetch() { # URL FILE
  case "$1" in
    gs://*) local rest="${1#gs://}"
      curl -fsS --retry 5 --retry-all-errors -K <(bearer) -o "$2" \
        "$storage/storage/v1/b/${rest%%/*}/o/$(escaped "${rest#*/}")?alt=media" ;;
    s3://*) aws s3 cp --only-show-errors "$1" "$2" ;;
    *) cp "${1#file://}" "$2" ;;
  esac
}
report() { # PHASE VERDICT [FILE WITH THE LOG]
  local body name="$node"
  [ "$host" = 0 ] || name="$node-h$host"
  body="$(python3 - "$name" "$1" "$2" "${3:-}" "$assignment" <<'PYTHON'
import json, sys, time
name, phase, verdict, log, fleet = sys.argv[1:]
try:
    known = json.load(open(fleet))
    deployment, hidden = known["deployment"], list((known.get("environment") or {}).values())
except (OSError, ValueError, KeyError):
    deployment, hidden = "", []
tail = open(log, errors="replace").read()[-4000:] if log else ""
for value in hidden:
    tail = tail.replace(value, "***") if len(value) >= 6 else tail
print(json.dumps({"node": name, "deployment": deployment, "phase": phase, "verdict": verdict, "updated": time.time(), "error": tail}))
PYTHON
)"
  case "$home" in
    gs://*) local rest="${home#gs://}"
      curl -fsS --retry 3 -o /dev/null -X POST -K <(bearer) -H 'Content-Type: application/json' \
        --data-binary @<(printf '%s' "$body") "$storage/upload/storage/v1/b/${rest%%/*}/o?uploadType=media&name=$(escaped "${rest#*/}/workers/$name.json")" ;;
    s3://*) printf '%s' "$body" | aws s3 cp --only-show-errors - "$home/workers/$name.json" ;;
    *) mkdir -p "$home/workers" && printf '%s' "$body" > "$home/workers/$name.json.tmp" && mv "$home/workers/$name.json.tmp" "$home/workers/$name.json" ;;
  esac
}
# The pause lets tee write the lines that the report quotes.
fail() { trap - ERR; echo "spile: the start failed: $1"; sleep 1; report failed crashed "$log" || true; exit 1; }
trap 'fail "line $LINENO$(offline)"' ERR
# A machine without a public address can read the bucket (Private Google Access), but not the packages.
offline() {
  local index=${PIP_INDEX_URL:-$(python3 -c 'from pip._internal.models.index import PyPI; print(PyPI.simple_url)' 2>/dev/null)}
  [ -n "${installing:-}" ] && [ -n "$index" ] && ! curl -fsS -m 20 -o /dev/null "$index" 2>/dev/null || return 0
  printf ': this machine cannot reach PyPI; without a public address its network needs Cloud NAT: gcloud compute routers create spile --network default --region REGION, then gcloud compute routers nats create spile --router spile --region REGION --auto-allocate-nat-external-ips --nat-all-subnet-ip-ranges'
}

# -- use only files of the bucket that were deployed --------------------------------------------------------------------
sha256() { sha256sum "$1" | cut -d ' ' -f 1; }
# Ask the API, because some metadata servers do not see changes while the machine runs.
pin_of_api() {
  curl -fsS -m 10 -K <(bearer) "${SPILE_TPU_ENDPOINT:-https://tpu.googleapis.com/}v2/projects/$(ask project/project-id)/locations/$zone/nodes/$node" |
    python3 -c 'import json, sys; print(json.load(sys.stdin).get("metadata", {}).get("spile-sha256", ""))'
}
# Check whether the sha256 of fleet.json, $1, is in the machine's metadata or in --pin. Set pinned to it, or to an empty
# string if nothing is pinned.
check_pinned() {
  local said
  pinned=''
  [ "$pin" != none ] || return 0
  [ "$pin" != "$1" ] || { pinned="$1"; return 0; }
  if ! said="$(ask instance/attributes/spile-sha256 2>/dev/null)"; then
    # Accept no answer only if the flags were given by hand and no pin was known before.
    [ -n "$by_hand" ] && [ ! -s "$place/pin" ] && [ -z "$pin" ]
    return
  fi
  [ "$said" != "$1" ] || { pinned="$1"; return 0; }
  if [ -z "$said$pin" ] && [ ! -s "$place/pin" ]; then
    echo "spile: nothing pins what this machine runs: its metadata has no spile-sha256; deploy again to pin it"
    return 0
  fi
  [ "$(pin_of_api 2>/dev/null || true)" = "$1" ] && pinned="$1"
}
named() { # FILE: print its sha256 from fleet.json, or nothing
  python3 -c 'import json, sys; print((json.load(open(sys.argv[1])).get("hashes") or {}).get(sys.argv[2], ""))' "$place/fleet.json" "$1"
}
fetch_named() { # FILE: fetch it and check its sha256
  local wanted found
  fetch "$home/$1" "$place/$1.new" || fail "cannot read $home/$1"
  wanted="$(named "$1")" found="$(sha256 "$place/$1.new")"
  if [ -n "$wanted" ] && [ "$found" != "$wanted" ]; then
    rm -f "$place/$1.new"
    fail "$home/$1 is not what was deployed: expected sha256 $wanted, found $found; deploy again, and see who may write the bucket"
  fi
  mv "$place/$1.new" "$place/$1"
}
# A deploy writes fleet.json first and then updates the machines' metadata, so try for a while.
for ((try = 1; ; try++)); do
  fetch "$home/fleet.json" "$place/fleet.new" || fail "cannot read $home/fleet.json"
  found="$(sha256 "$place/fleet.new")"
  ! check_pinned "$found" || break
  if [ "$try" -ge "${SPILE_TRIES:-10}" ]; then
    assignment="$place/fleet.new"
    fail "$home/fleet.json is not what was deployed: expected the sha256 in this machine's metadata (spile-sha256), found $found; deploy again, and see who may write the bucket"
  fi
  sleep "$((try < 5 ? try : 5))"
done
mv "$place/fleet.new" "$place/fleet.json"
printf '%s' "$pinned" > "$place/pin"
fetch_named startup.sh
report booting ''
wheel="$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("wheel") or "")' "$place/fleet.json")"

# -- a recent Python with the wheel -------------------------------------------------------------------------------------
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
install() {
  local found='' each
  rm -rf "$place/venv"
  for each in python3.13 python3.12 python3.11 python3; do
    if command -v "$each" > /dev/null && new_enough "$each" && "$each" -c 'import ensurepip, venv' 2>/dev/null; then found="$each"; break; fi
  done
  fetch_named "$wheel"
  hash_list
  if [ -n "$found" ] && ! command -v uv > /dev/null; then
    "$found" -m venv "$place/venv"
    into "$place/venv/bin/pip" install --quiet
  else
    export PATH="$HOME/.local/bin:$PATH" UV_PYTHON_INSTALL_DIR="$place/python"
    command -v uv > /dev/null || get_uv
    uv venv --quiet --python 3.12 "$place/venv"
    into uv pip install --quiet --python "$place/venv/bin/python"
  fi
  for each in "$place/venv" "$place/python"; do [ ! -d "$each" ] || chmod -R go+rX "$each"; done  # The worker reads them.
  echo "$wheel" > "$place/installed"
}
# Install by hash if there are hashes. requirements.txt is for a machine with TPUs. Without TPUs libtpu is left out, and
# with a GPU requirements-cuda.txt is added.
hash_list() {
  local extras="${SPILE_EXTRAS-[tpu]}"
  [ -n "$(named requirements.txt)" ] || return 0
  fetch_named requirements.txt
  case "$extras" in
    '[tpu]') hashed="$place/requirements.txt"; return 0 ;;
    '' | '[cuda]') sed '/^libtpu==/,/[^\\]$/d' "$place/requirements.txt" > "$place/requirements.here" ;;
    *) echo "spile: installed without hashes: there are none for spile$extras"; return 0 ;;
  esac
  if [ "$extras" = '[cuda]' ]; then
    fetch_named requirements-cuda.txt
    cat "$place/requirements-cuda.txt" >> "$place/requirements.here"
  fi
  hashed="$place/requirements.here"
}
into() { # THE INSTALLER'S COMMAND
  if [ -n "$hashed" ]; then
    "$@" --require-hashes -r "$hashed"
    "$@" --no-deps "$place/$wheel"
  else
    "$@" "spile${SPILE_EXTRAS-[tpu]} @ file://$place/$wheel"
  fi
}
get_uv() {
  # Without python3-venv, Ubuntu 24.04 refuses even an installation for the user alone (PEP 668). Older pips ignore this.
  export PIP_BREAK_SYSTEM_PACKAGES=1
  if [ -n "$hashed" ]; then
    python3 -m pip install --quiet --user --no-deps --require-hashes -r <(sed -n '/^uv==/,/[^\\]$/p' "$hashed")
  else
    python3 -m pip install --quiet --user uv
  fi
}
export HOME="${HOME:-/root}"
python="${SPILE_PYTHON:-$place/venv/bin/python}"
fresh='' hashed=''
if [ -z "${SPILE_PYTHON:-}" ]; then
  if [ -n "$force" ] || [ ! -x "$python" ] || [ "$(cat "$place/installed" 2>/dev/null)" != "$wheel" ]; then
    report installing ''
    installing=1
    install
    installing=''
    fresh=1
  fi
fi
new_enough "$python" || fail "expected Python 3.11 or newer, found $("$python" --version 2>&1)"

# -- a separate user for the worker on a fleet's machine: root only fetches, checks and installs ---------------------------
user=spile as_worker=() work="$place"
make_user() {
  local each
  id "$user" > /dev/null 2>&1 || useradd --system --user-group --no-create-home --home-dir "$place/worker" --shell /usr/sbin/nologin "$user" || return 1
  chmod 711 "$place"
  mkdir -p "$place/worker" && chown "$user:$user" "$place/worker" && chmod 700 "$place/worker"
  # Give the user the chips, and the files of libtpu that an earlier run as root may have left.
  for each in "${SPILE_DEVICES:-/dev}"/accel[0-9]* "${SPILE_DEVICES:-/dev}"/vfio/*; do
    [ ! -e "$each" ] || { chgrp "$user" "$each" && chmod g+rw "$each"; }
  done
  for each in /tmp/libtpu_lockfile /tmp/tpu_logs; do [ ! -e "$each" ] || chown -RhP "$user:$user" "$each"; done
}
# If only root's home contains the credentials, the worker runs as root.
if [ "$(id -u)" = 0 ] && [ -z "${SPILE_HOME:-}" ] && [ ! -e "$place/as-root" ] && command -v useradd > /dev/null && command -v setpriv > /dev/null &&
  [ ! -e "$HOME/.aws" ] && [ ! -e "$HOME/.config/gcloud/application_default_credentials.json" ] && make_user; then
  work="$place/worker"
  as_worker=(setpriv --reuid "$user" --regid "$user" --init-groups env "HOME=$work" "USER=$user")
elif [ -z "$install_only" ]; then
  echo "spile: the worker runs as $(id -un): this machine has no user of its own for it"
fi

# -- the chips ----------------------------------------------------------------------------------------------------------
sees_chips() { # HOSTS: check that the worker can use the chips
  "${as_worker[@]}" "$python" - "$1" <<'PYTHON'
import glob, os, sys
chips = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
if chips and int(sys.argv[1]) > 1:
    print("spile: this host has", len(chips), "chips")
    sys.exit(not all(os.access(chip, os.R_OK | os.W_OK) for chip in chips))
import jax
devices = jax.devices()
print("spile: JAX", jax.__version__, "sees", len(devices), devices[0].platform, "devices")
sys.exit(devices[0].platform != "tpu")
PYTHON
}
if [ "${SPILE_EXPECT:-tpu}" != any ] && { [ -n "$fresh" ] || [ -n "$force" ] || [ ! -f "$place/checked" ]; }; then
  # On a slice of several hosts JAX waits for all of them, and some may start later, so check the device files instead.
  hosts="$(meta instance/attributes/worker-network-endpoints 2>/dev/null | tr ',' '\n' | wc -l || echo 1)"
  if ! sees_chips "$hosts"; then
    [ "${#as_worker[@]}" != 0 ] || fail "JAX sees no TPU"
    as_worker=() work="$place"
    sees_chips "$hosts" || fail "JAX sees no TPU"
    echo "spile: JAX sees the chips as root alone: the worker runs as root"
    touch "$place/as-root"
  fi
  touch "$place/checked"
fi

# -- the service --------------------------------------------------------------------------------------------------------
[ -z "$install_only" ] || exit 0
secret="$(ask instance/attributes/spile-secret || true)"
printf 'SPILE_POD_SECRET=%s\n' "${secret//[^A-Za-z0-9_-]/}" > "$place/secret.env"
cat > "$place/launch.sh" <<LAUNCH
#!/bin/bash
# Run the agent. After a new deployment, install its wheel and start again.
cd "$work"
set -a; . "$place/secret.env"; set +a  # The secret that the hosts of this slice share, if the metadata contains one.
while true; do
  ${as_worker[*]} "$python" -m spile.fleet.agent --home "$home" --node "$node" --zone "$zone" --host "$host" --pin "\$(cat "$place/pin")" ${SPILE_AGENT_FLAGS:-}
  code=\$?
  [ \$code = 75 ] || exit \$code
  /bin/bash "$place/startup.sh" --home "$home" --node "$node" --zone "$zone" --host "$host" --install-only || exit 1
done
LAUNCH
cat > "$units/spile-worker.service" <<UNIT
[Unit]
Description=spile worker
Wants=network-online.target
After=network-online.target

[Service]
WorkingDirectory=$place
Environment="HOME=$HOME"
# The TPU runtime starts in half the time with transparent hugepages, by the changelog of JAX.
ExecStartPre=-/bin/sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'
ExecStart=/bin/bash $place/launch.sh
Restart=on-failure
RestartSec=30
LimitMEMLOCK=infinity
TimeoutStopSec=25

[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
systemctl enable spile-worker.service
if [ -n "$fresh$force" ]; then systemctl restart spile-worker.service; else systemctl start spile-worker.service; fi
echo "spile: the worker runs; its log: journalctl -u spile-worker"
