#!/usr/bin/env bash
# Brings what the checks (`tools`), the tests (`system`) and the benchmark (`peers`) need, and skips what is there;
# installs the Python package itself (`package`).
#
# Called by make, which sets TOOLS and the versions. Without CI=true a missing system component is a warning, because
# the tests that need it are skipped; with CI=true it is an error, because there a skipped test is a hidden failure.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}
missing() {
    if [ "${CI:-}" = true ]; then fail "$* (CI=true allows no missing component)"; fi
    printf 'setup: warning: %s\n' "$*" >&2
}
have() { command -v "$1" >/dev/null 2>&1; }

# The first Python that is new enough and can make virtual environments.
python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$candidate" "$@"
            return
        fi
    done
    fail "no Python 3.11 or newer with venv: install python3 and python3-venv, or name one in PYTHON"
}

tools() {
    have cargo || fail "cargo is missing: install Rust with rustup; rust-toolchain.toml names the version"
    have cc || system
    local deny="$TOOLS/cargo-deny-$CARGO_DENY_VERSION" ruff="$TOOLS/ruff-$RUFF_VERSION"
    if ! [ -x "$deny/bin/cargo-deny" ]; then
        say "building cargo-deny $CARGO_DENY_VERSION, once; about a minute on two cores"
        # Unoptimised: it builds three times faster and still checks this workspace in under a second.
        CARGO_PROFILE_DEV_DEBUG=0 cargo install "cargo-deny@$CARGO_DENY_VERSION" --locked --debug --root "$deny"
    fi
    if ! [ -x "$ruff/bin/ruff" ]; then
        say "installing ruff $RUFF_VERSION"
        python -m venv --clear "$ruff"
        "$ruff/bin/pip" install "ruff==$RUFF_VERSION"
    fi
    say "tools are ready"
}

# Open MPI is a peer in the benchmark; ip and tc make hosts out of network namespaces; setpriv drops privileges; sshd
# serves the tests that start agents over ssh; Spark needs Java.
system() {
    local packages=()
    have cc || packages+=(gcc libc6-dev)
    have ip && have tc || packages+=(iproute2)
    have setpriv || packages+=(util-linux)
    have mpicc || packages+=(libopenmpi-dev)
    # Open MPI looks for a remote shell even when every rank is local.
    have mpirun && have ssh || packages+=(openmpi-bin openssh-client)
    have java && have keytool || packages+=(openjdk-17-jre-headless)
    # Installing it opens a port where an init system starts it, so a machine that is not for this alone is asked first.
    [ -x /usr/sbin/sshd ] || if [ "${CI:-}" = true ]; then packages+=(openssh-server); fi
    if [ ${#packages[@]} -gt 0 ]; then
        local root=()
        [ "$(id -u)" = 0 ] || root=(sudo)
        if [ -n "${root[*]}" ] && ! [ -t 0 ]; then root+=(-n); fi
        if ! have apt-get || { [ -n "${root[*]}" ] && ! have sudo; }; then
            missing "not installed, and neither apt-get as root nor sudo is at hand: ${packages[*]}"
        else
            say "installing ${packages[*]}"
            # A machine that has just started may still hold the lock for its own upgrades.
            local apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120)
            if ! "${apt[@]}" update || ! "${apt[@]}" install --yes --no-install-recommends "${packages[@]}"; then
                missing "apt-get could not install ${packages[*]}"
            fi
        fi
    fi

    local command
    for command in cc ip tc setpriv mpicc mpirun java keytool; do
        have "$command" || missing "$command is not installed: the tests and benchmarks that use it are skipped"
    done
    [ -x /usr/sbin/sshd ] || missing "/usr/sbin/sshd is not installed (openssh-server): the tests that use it are skipped"
    local namespace="dt-setup-$$" answer
    if answer=$(ip netns add "$namespace" 2>&1); then
        ip netns delete "$namespace"
    else
        missing "no network namespaces, so no tests with several hosts: ip netns add: $answer"
    fi
    say "system components are checked"
}

# PyTorch brings Gloo; pytest and mypy test the package, which also runs on the Spark before. The stamp is written last, so
# that an interrupted installation is made again.
peers() {
    local stamp spark=(pyspark==3.5.9 py4j==0.10.9.7)
    stamp="$(sha256sum <requirements-test.txt) ${spark[*]} $(python --version)"
    if ! [ -x .venv/bin/python ] || [ "$(cat .venv/stamp 2>/dev/null)" != "$stamp" ]; then
        say "installing PyTorch, Spark, matplotlib and pytest into .venv; a few minutes, 7 GB"
        python -m venv --clear .venv
        .venv/bin/python -m pip install --requirement requirements-test.txt
        .venv/bin/python -m pip install --no-deps --no-build-isolation --target .venv/spark-3.5 "${spark[@]}"
        .venv/bin/python -c 'import torch.distributed as d; assert d.is_gloo_available(), "this PyTorch has no Gloo"'
        printf '%s\n' "$stamp" >.venv/stamp
    fi
    say ".venv is ready"
}

# What users get by `pip install .`, with maturin from .venv so that nothing is fetched; cargo builds what has changed.
package() {
    say "building the Python package; a few minutes the first time"
    PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
        --force-reinstall . ./python/horovod
    say "deuteron is installed in .venv"
}

for part in "$@"; do
    case "$part" in
        tools | system | peers | package) "$part" ;;
        *) fail "unknown part $part: tools, system, peers or package" ;;
    esac
done
