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
# While a switch is under way .before leads to the revision that was in force: one that was ended in between is known by it,
# and the next one goes back there where the appliance refuses. A reload may take --wait seconds (3600): it reads weights.
# Exit status: 0 in force; 1 refused, nothing has changed; 2 wrong use; 3 swapped, and nothing runs or starts here: what
# starts next reads the new files; 4 swapped, and whether it is in force is not known: the same again finds out.
set -eu

etc=/etc/athanor
admin=auto
wait_s=3600
sums=SHA256SUMS
trial=
told=
# Status of a run that ends by what nobody expects, as where the disk is full; 4 once the files are swapped.
failed=1

say() { printf 'athanor-files: %s\n' "$*" >&2; }
leave() { told=yes; exit "$1"; }
refuse() { say "$*"; leave 1; }
wrong() { say "$*"; sed -n '4,7s/^# *//p' "$0" >&2; leave 2; }
clean() { if [ -n "$trial" ]; then rm -rf "$trial"; fi; }
ended() {
    ending=$?
    clean || true
    if [ "$ending" = 0 ] || [ -n "$told" ]; then exit "$ending"; fi
    say "a command failed (status $ending)"
    exit "$failed"
}
trap ended EXIT

# Files and folders of a folder, without its sums and what begins with a dot. `whole` has seen that none has a blank.
names() { (cd "$1" && for one in *; do [ "$one" = "$sums" ] || [ ! -e "$one" ] || printf '%s\n' "$one"; done); }

# The revision that a link names; nothing where there is no link.
named() { readlink "$etc/$1" 2>/dev/null | sed -n 's#^revisions/##p' || true; }

leads() { [ "$(readlink "$1" || true)" = "current/${1##*/}" ]; }

# A link is replaced by one rename, so that no reader finds none. A run that was killed may have left the first of both.
link() { ln -sfT "$1" "$etc/.new" && mv -T "$etc/.new" "$2"; }

# What a command says names the trial's files: they are those of the revision.
passes() {
    said=$("$@" 2>&1) || { printf '%s\n' "$said" | sed "s#$trial/#$new/#g" >&2; return 1; }
}

# A revision has regular files alone, all of them with their sums, under names that can be linked.
whole() {
    new=$etc/revisions/$1
    [ -f "$new/$sums" ] || refuse "$new has no $sums: it is not there, or not whole"
    odd=$(find "$new/" ! -type f ! -type d)
    [ -z "$odd" ] || refuse "$1 has what is no file, of which $sums says nothing: $odd"
    odd=$(cd "$new" && LC_ALL=C find . -maxdepth 1 -name '*[!A-Za-z0-9._+@=-]*')
    [ -z "$odd" ] || refuse "names in $1 have letters, digits and ._+@=- alone: $odd"
    for one in current previous revisions; do
        [ ! -e "$new/$one" ] || refuse "$1 has a file $one, and $etc/$one is no link to a file of it"
    done
    (cd "$new" && sha256sum --check --strict --quiet "$sums") >&2 || refuse "files of $1 are not those of its $sums"
    listed=$(sed 's/^[0-9a-f]* [ *]//' "$new/$sums" | LC_ALL=C sort)
    there=$(cd "$new" && find . -type f ! -path "./$sums" | sed 's#^\./##' | LC_ALL=C sort)
    [ "$listed" = "$there" ] || refuse "$sums of $1 does not list just the files that are there"
    [ -f "$new/athanor.yaml" ] && [ -f "$new/policy.yaml" ] || refuse "$1 has no athanor.yaml or no policy.yaml"
}

check() {
    whole "$1"
    for one in current previous; do
        [ -L "$etc/$one" ] || [ ! -e "$etc/$one" ] || refuse "$etc/$one is no link: move it away"
    done
    # A relative path would be one of this revision's folder for as long as the appliance runs. Places of values are none.
    if athanor config show --config "$new/athanor.yaml" -o json 2>/dev/null | grep "\"$new/" | grep -v ':[0-9]*:[0-9]*"' >&2; then
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
    printf '%s\n' "$said" | grep -qF "\"policy\": \"$trial/policy.yaml\"" ||
        refuse "athanor.yaml of $1 does not name $etc/policy.yaml: the policy that it names would not be checked"
    passes athanor policy check "$trial/policy.yaml" --config "$trial/athanor.yaml" --strict || refuse "policy of $1 is refused"
    if [ -f "$new/credentials.json" ]; then
        passes athanor key list --credentials "$new/credentials.json" || refuse "credentials of $1 are refused"
    fi
    clean
    trial=
}

# Links to files that the revision in force does not have.
sweep() {
    for one in "$etc"/*; do
        if leads "$one" && [ ! -e "$one" ]; then rm "$one"; fi
    done
}

# Nothing from here to the end needs room on the disk: what is over is known, and so is the way back.
settle() {
    if [ -n "$before" ] && [ "$before" != "$1" ]; then mv -T "$etc/.before" "$etc/previous"; else rm -f "$etc/.before"; fi
    sweep
}

# Names of the old revision that the new one lacks go last, so that the way back is one rename too.
switch() {
    check "$1"
    before=$(named .before)
    [ -n "$before" ] || before=$(named current)
    if [ -n "$before" ]; then link "revisions/$before" "$etc/.before"; fi
    for one in $(names "$etc/revisions/$1"); do
        leads "$etc/$one" || link "current/$one" "$etc/$one"
    done
    link "revisions/$1" "$etc/current" || refuse "cannot swap $etc/current"
    failed=4
    status=0
    said=$(athanor reload --admin "$admin" --timeout "$wait_s" 2>&1) || status=$?
    printf '%s\n' "$said" >&2
    case $status in
        0) settle "$1"; say "$1 is in force" ;;
        1) turn_back "$1" ;;
        *) unanswered "$1" ;;
    esac
}

turn_back() {
    if [ -z "$before" ]; then
        rm "$etc/current"
        failed=1
        sweep
        refuse "the appliance refused $1, and there was none before: $etc has no revision's files again"
    fi
    if [ "$before" = "$1" ]; then
        settle "$1"
        refuse "the appliance refused $1, which is in force since before: there is nothing to take back"
    fi
    mv -T "$etc/.before" "$etc/current"
    failed=1
    sweep
    athanor reload --admin "$admin" --timeout "$wait_s" >&2 ||
        say "the reload of $before failed as well: athanor status says what is in force"
    refuse "the appliance refused $1: $before stays in force"
}

# Whether systemd has a gateway that does not listen yet, or does after all: it reads its files long before.
starts() {
    case $(systemctl show --property ActiveState --value athanor-gateway.service 2>/dev/null || true) in
        active | activating | reloading) return 0 ;;
    esac
    return 1
}

# An appliance that does not run (status 6) reads the files at its next start. One that starts may have read what was before,
# one that has not answered may have refused them, and one that ended meanwhile may not start with them.
unanswered() {
    if [ "$status" = 6 ] && ! starts; then
        settle "$1"
        say "the next start reads $1: nothing here answered the reload"
        leave 3
    fi
    say "whether $1 is in force is not known (status $status): athanor status tells; the same again reloads, and goes back where that is refused"
    leave 4
}

while [ $# -gt 0 ]; do
    case $1 in --etc | --admin | --wait) [ -n "${2:-}" ] || wrong "$1 needs a value" ;; esac
    case $1 in
        --etc) etc=$2; shift 2 ;;
        --admin) admin=$2; shift 2 ;;
        --wait) wait_s=$2; shift 2 ;;
        -*) wrong "there is no option $1" ;;
        *) break ;;
    esac
done
case "${1:-}:$#" in check:2 | switch:2 | back:1 | show:1) ;; *) wrong "what to do is one of these" ;; esac
[ -d "$etc/revisions" ] || wrong "$etc/revisions is no folder"
# By the name that it was given: the configuration names files by that, also where a folder on the way is a link.
etc=$(cd "$etc" && pwd)
case $etc in *[!A-Za-z0-9/._+@=-]*) wrong "$etc: letters, digits and /._+@=- alone" ;; esac
if [ "$1" = show ]; then printf '%s\n%s\n' "$(named current)" "$(named previous)"; exit; fi
case ${2-none} in '' | .* | *[!A-Za-z0-9._+@=:-]*) wrong "REVISION is the name of a folder in $etc/revisions" ;; esac
exec 9>"$etc/revisions/.lock"
flock --wait 120 9 || refuse "another run holds $etc/revisions/.lock"
# Of runs that were killed.
rm -rf "$etc"/.trial.* "$etc/.new"
case $1 in
    check) check "$2"; say "$2 can be put in force" ;;
    switch) switch "$2" ;;
    back)
        last=$(named .before)
        if [ -z "$last" ] || [ "$last" = "$(named current)" ]; then last=$(named previous); fi
        [ -n "$last" ] || refuse "there is no revision before"
        switch "$last"
        ;;
esac
