# shellcheck shell=bash
# Reads lists of hosts for multi_node.sh, which sources this file and has `die`: h1,h2:4,node[01-03,07]. Fills two arrays
# that run side by side; slots are empty where none are given.

# is_count TEXT: a whole number from 1 to 999999.
is_count() { [[ $1 =~ ^[1-9][0-9]{0,5}$ ]]; }

names=() slots=()

# add_host WHERE NAME SLOTS: expand the first [...] of a name, and add the hosts that come out.
add_host() {
    local where=$1 name=$2 before after part low high number
    if [[ $name =~ ^([^][]*)\[([^][]+)\](.*)$ ]]; then
        before=${BASH_REMATCH[1]} after=${BASH_REMATCH[3]}
        # The added comma keeps an empty last part.
        while IFS= read -r -d , part; do
            [[ $part =~ ^([0-9]{1,9})(-([0-9]{1,9}))?$ ]] ||
                die "$where: '$part' in '$name' is no number or range, such as 3 or 01-12"
            low=${BASH_REMATCH[1]} high=${BASH_REMATCH[3]:-${BASH_REMATCH[1]}}
            ((10#$low <= 10#$high && 10#$high - 10#$low < 10000)) ||
                die "$where: range '$part' in '$name' must go up, by less than 10000"
            for ((number = 10#$low; number <= 10#$high; number++)); do
                add_host "$where" "$before$(printf '%0*d' ${#low} "$number")$after" "$3"
            done
        done <<<"${BASH_REMATCH[2]},"
        return
    fi
    [[ $name =~ ^[A-Za-z0-9_]([A-Za-z0-9._-]*)$ ]] ||
        die "$where: '$name' is no host name; write h1,h2:4 or node[01-03], without spaces or empty entries"
    local other
    for other in "${names[@]}"; do
        [[ $other != "$name" ]] || die "$where: host $name is named twice; write $name:2 for two slots"
    done
    names+=("$name")
    slots+=("$3")
}

# add_entry WHERE ENTRY: a host or range of hosts, with or without `:SLOTS`.
add_entry() {
    local name=$2 count=''
    if [[ $2 == *:* ]]; then
        name=${2%:*} count=${2##*:}
        is_count "$count" || die "$1: '$2' must end in a number of slots of 1 or more after ':', as in h1:4"
    fi
    add_host "$1" "$name" "$count"
}

# add_list WHERE LIST: entries with commas between them; commas in brackets belong to the entry.
add_list() {
    local entry='' depth=0 index char
    for ((index = 0; index < ${#2}; index++)); do
        char=${2:index:1}
        case $char in
        '[') ((++depth)) ;;
        ']') ((--depth)) || true ;;
        esac
        ((depth == 0 || depth == 1)) || break
        if [[ $char == , ]] && ((depth == 0)); then
            add_entry "$1" "$entry"
            entry=
        else
            entry+=$char
        fi
    done
    ((depth == 0)) || die "$1: the brackets in '$2' don't match; write node[01-03,07]"
    add_entry "$1" "$entry"
}

add_file() {
    local line number=0
    [[ -f $1 && -r $1 ]] || die "--hostfile: '$1' is no file that can be read"
    while IFS= read -r line || [[ -n $line ]]; do
        ((++number))
        line=${line%%#*}
        if [[ $line =~ ^[[:space:]]*([^[:space:]]+)[[:space:]]+slots=([^[:space:]]*)[[:space:]]*$ ]]; then
            add_list "$1, line $number" "${BASH_REMATCH[1]}:${BASH_REMATCH[2]}"
        elif [[ $line =~ ^[[:space:]]*(.*[^[:space:]])[[:space:]]*$ ]]; then
            add_list "$1, line $number" "${BASH_REMATCH[1]}"
        fi
    done <"$1"
    ((${#names[@]})) || die "--hostfile: '$1' names no host; write one per line"
}
