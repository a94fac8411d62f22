#!/bin/sh
# Puts one revision of a fleet's files in force on this host, all of it at once or nothing: docs/fleet.md.
#
#   athanor-files.sh check REVISION     is it whole, and does the appliance take it? Changes nothing
#   athanor-files.sh switch REVISION    the same, then swap and reload; back to what was, where the reload is refused
#   athanor-files.sh back               switch to the revision before
#   athanor-files.sh show               the revision in force, and the one before
#
# ETC (--etc, /etc/athanor) has  revisions/NAME/  which a configuration manager writes, with SHA256SUMS of all its files;
# current -> revisions/NAME, previous -> the one before, and for each file of a revision a link of its name to current/.
# Exit status: 0 in force; 1 refused, nothing has changed; 2 wrong use; 3 swapped, but nothing here answered the reload:
# what starts next reads the new files.
set -eu

etc=/etc/athanor
admin=auto
sums=SHA256SUMS
trial=

say() { printf 'athanor-files: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 1; }
wrong() { say "$*"; sed -n '4,7s/^# *//p' "$0" >&2; exit 2; }
clean() { if [ -n "$trial" ]; then rm -rf "$trial"; fi; }
trap clean EXIT

# Files and folders of a folder, without its sums and what begins with a dot.
names() { (cd "$1" && for one in *; do [ "$one" = "$sums" ] || [ ! -e "$one" ] || printf '%s\n' "$one"; done); }

# The revision that a link names; nothing where there is no link.
named() { readlink "$etc/$1" 2>/dev/null | sed -n 's#^revisions/##p' || true; }

leads() { [ "$(readlink "$1" || true)" = "current/${1##*/}" ]; }

# A link is replaced by one rename, so that no reader finds none.
link() { ln -s "$1" "$2.new.$$" && mv -T "$2.new.$$" "$2"; }

# What a command says names the trial's files: they are those of the revision.
passes() {
    said=$("$@" 2>&1) || { printf '%s\n' "$said" | sed "s#$trial/#$new/#g" >&2; return 1; }
}

check() {
    new=$etc/revisions/$1
    [ -f "$new/$sums" ] || refuse "$new has no $sums: it is not there, or not whole"
    (cd "$new" && sha256sum --check --strict --quiet "$sums") >&2 || refuse "files of $1 are not those of its $sums"
    listed=$(sed 's/^[0-9a-f]* [ *]//' "$new/$sums" | LC_ALL=C sort)
    there=$(cd "$new" && find . -type f ! -path "./$sums" | sed 's#^\./##' | LC_ALL=C sort)
    [ "$listed" = "$there" ] || refuse "$sums of $1 does not list just the files that are there"
    [ -f "$new/athanor.yaml" ] && [ -f "$new/policy.yaml" ] || refuse "$1 has no athanor.yaml or no policy.yaml"
    # A relative path would be one of this revision's folder for as long as the appliance runs.
    if athanor config show --config "$new/athanor.yaml" -o json 2>/dev/null | grep "\"$new/" | grep -v "\"$new/athanor.yaml:" >&2; then
        refuse "athanor.yaml of $1 has relative paths: write $etc/... in their place"
    fi
    # The folder as it will be: the new files, beside what no revision has.
    trial=$(mktemp -d "$etc/.trial.XXXXXX")
    for one in "$etc"/*; do
        case ${one##*/} in revisions | current | previous) continue ;; esac
        leads "$one" || ln -s "$one" "$trial/${one##*/}"
    done
    for one in $(names "$new"); do
        [ ! -L "$trial/$one" ] || refuse "$etc/$one is no link to current/$one: somebody wrote it here; bring it into the revision"
        ln -s "$new/$one" "$trial/$one"
    done
    rm "$trial/athanor.yaml"
    sed "s#$etc/#$trial/#g" "$new/athanor.yaml" >"$trial/athanor.yaml"
    passes athanor config show --config "$trial/athanor.yaml" -o json || refuse "athanor.yaml of $1 is refused"
    passes athanor policy check "$trial/policy.yaml" --config "$trial/athanor.yaml" --strict || refuse "policy of $1 is refused"
    if [ -f "$new/credentials.json" ]; then
        passes athanor key list --credentials "$new/credentials.json" || refuse "credentials of $1 are refused"
    fi
    clean
    trial=
}

# Links for the names of the revision come first, those that it has no more go last.
turn() {
    for one in $(names "$etc/revisions/$1"); do
        leads "$etc/$one" || link "current/$one" "$etc/$one"
    done
    link "revisions/$1" "$etc/current"
    for one in "$etc"/*; do
        if leads "$one" && [ ! -e "$one" ]; then rm "$one"; fi
    done
}

switch() {
    check "$1"
    before=$(named current)
    turn "$1"
    status=0
    athanor reload --admin "$admin" || status=$?
    if [ "$status" -eq 1 ]; then
        if [ -z "$before" ] || [ "$before" = "$1" ]; then refuse "the appliance refused $1, and there is none to go back to"; fi
        turn "$before"
        athanor reload --admin "$admin" >&2 || say "the reload of $before failed as well: athanor status says what is in force"
        refuse "the appliance refused $1: $before stays in force"
    fi
    if [ -n "$before" ] && [ "$before" != "$1" ]; then link "revisions/$before" "$etc/previous"; fi
    if [ "$status" -ne 0 ]; then
        say "the next start reads $1: nothing here answered the reload (status $status)"
        exit 3
    fi
    say "$1 is in force"
}

while [ $# -gt 0 ]; do
    case $1 in
        --etc) etc=${2:?a folder}; shift 2 ;;
        --admin) admin=${2:?an address}; shift 2 ;;
        -*) wrong "there is no option $1" ;;
        *) break ;;
    esac
done
case "${1:-}:$#" in check:2 | switch:2 | back:1 | show:1) ;; *) wrong "what to do is one of these" ;; esac
case "${2:-}" in */* | .*) wrong "REVISION is the name of a folder in $etc/revisions" ;; esac
[ -d "$etc/revisions" ] || wrong "$etc/revisions is no folder"
etc=$(cd "$etc" && pwd -P)
exec 9>"$etc/revisions/.lock"
flock --wait 120 9 || refuse "another run holds $etc/revisions/.lock"
case $1 in
    check) check "$2"; say "$2 can be put in force" ;;
    switch) switch "$2" ;;
    back)
        last=$(named previous)
        [ -n "$last" ] || refuse "there is no revision before"
        switch "$last"
        ;;
    show) printf '%s\n%s\n' "$(named current)" "$(named previous)" ;;
esac
