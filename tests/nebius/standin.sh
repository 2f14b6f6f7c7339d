#!/bin/sh
# Stands in for nebius and helm (by the name it is called by): does as much as the steps of a cluster need,
# keeps what was made as files below $STANDIN, records every call, and fails once where $STANDIN/fail says so.
set -eu
program=${0##*/}

say_if_told() {  # what: an error of one look-up, which is none of "there is none"
  [ -f "$STANDIN/says" ] || return 0
  IFS='|' read -r what said < "$STANDIN/says"
  if [ "$what" = "$1" ]; then
    echo "$said" >&2
    exit 1
  fi
}

fail_if_told() {  # before|after, what
  [ -f "$STANDIN/fail" ] || return 0
  IFS='|' read -r when what < "$STANDIN/fail"
  if [ "$when" = "$1" ] && [ "$what" = "$2" ]; then
    rm "$STANDIN/fail"
    echo "Error: the connection broke" >&2
    exit 1
  fi
}

absent() {
  echo "Error: rpc error: code = NotFound desc = $* not found" >&2
  exit 1
}

print_thing() {  # file
  read -r id name created < "$1"
  state=RUNNING
  if [ -f "$STANDIN/slow" ]; then rm "$STANDIN/slow"; state=PROVISIONING; fi
  printf '{"metadata":{"id":"%s","name":"%s","created_at":"%s"},"spec":{"member_id":"%s"},' "$id" "$name" "$created" "$name"
  printf '"status":{"state":"%s","target_node_count":2,"ready_node_count":2}}\n' "$state"
}

{
  printf '%s' "$program"
  printf '\t%s' "$@" | tr '\n' ' '
  echo
} >> "$STANDIN/calls"

case $program in
nebius)
  noun="$1-$2" verb=$3
  shift 3
  id='' name=''
  while [ $# -gt 0 ]; do
    case $1 in
      --id) id=$2; shift ;;
      --name | --member-id | --context-name) name=$2; shift ;;
    esac
    shift
  done
  things="$STANDIN/$noun"
  mkdir -p "$things"
  say_if_told "$noun $verb"
  fail_if_told before "$noun $verb"
  case $verb in
    create)
      [ ! -f "$things/$name" ] || { echo "Error: code = AlreadyExists" >&2; exit 1; }
      echo "$noun-$name $name $(date -u +%Y-%m-%dT%H:%M:%SZ)" > "$things/$name"
      fail_if_told after "$noun $verb"
      print_thing "$things/$name"
      ;;
    get-by-name)
      [ -f "$things/$name" ] || absent "$name"
      print_thing "$things/$name"
      ;;
    get)
      [ -f "$things/${id#"$noun"-}" ] || absent "$id"
      print_thing "$things/${id#"$noun"-}"
      ;;
    delete)
      [ -f "$things/${id#"$noun"-}" ] || absent "$id"
      rm "$things/${id#"$noun"-}"
      fail_if_told after "$noun $verb"
      ;;
    get-credentials)
      [ -f "$things/${id#"$noun"-}" ] || absent "$id"
      mkdir -p "$STANDIN/contexts"
      : > "$STANDIN/contexts/$name"
      fail_if_told after "$noun $verb"
      ;;
    *) echo "Error: unknown command $verb" >&2; exit 1 ;;
  esac
  ;;
helm)
  context='' namespace='' release=''
  while [ $# -gt 0 ]; do
    case $1 in
      --kube-context) context=$2; shift ;;
      --namespace) namespace=$2; shift ;;
      --version | --set | --timeout) shift ;;
      upgrade) release=$2; shift ;;
    esac
    shift
  done
  [ -f "$STANDIN/contexts/$context" ] || { echo "Error: no such context: $context" >&2; exit 1; }
  mkdir -p "$STANDIN/helm"
  fail_if_told before "helm upgrade"
  : > "$STANDIN/helm/$namespace $release"
  fail_if_told after "helm upgrade"
  ;;
esac
