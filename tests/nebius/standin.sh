#!/bin/sh
# Stands in for nebius, helm and kubectl (by the name it is called by): does as much as the steps of a cluster need,
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
    list)
      if [ -f "$STANDIN/subnets" ]; then cat "$STANDIN/subnets"
      else echo '{"items":[{"metadata":{"id":"vpcsubnet-e00only","name":"default"}}]}'; fi
      ;;
    list-members)
      printf '{"memberships":['
      comma=''
      for thing in "$things"/*; do
        [ -f "$thing" ] || continue
        printf '%s' "$comma"
        print_thing "$thing"
        comma=,
      done
      echo ']}'
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
helm | kubectl)
  all="$*" context='' namespace='default' words=''
  while [ $# -gt 0 ]; do
    case $1 in
      --context | --kube-context) context=$2; shift ;;
      --namespace) namespace=$2; shift ;;
      --filter) words="$words $2"; shift ;;
      --version | --set | --timeout | -f | -o) shift ;;
      --*) ;;
      *) words="$words $1" ;;
    esac
    shift
  done
  [ -f "$STANDIN/contexts/$context" ] || { echo "Error: no such context: $all" >&2; exit 1; }
  # shellcheck disable=SC2086
  set -- $words
  verb=$1
  mkdir -p "$STANDIN/$program"
  say_if_told "$program $verb"
  case $verb in
    apply)
      text=$(cat)
      kind=$(echo "$text" | sed -n 's/^kind: //p')
      name=$(echo "$text" | sed -n 's/^  name: //p')
      fail_if_told before "apply $kind"
      told=$kind
      [ "$kind" = Namespace ] || namespace=$(echo "$text" | sed -n 's/^  namespace: //p')
      case $kind in Namespace) kind=namespace namespace=default ;; PersistentVolumeClaim) kind=pvc ;; esac
      if [ "$kind" = pvc ] && [ "$namespace" != default ]; then
        [ -f "$STANDIN/kubectl/namespace default $namespace" ] || absent "namespace $namespace"
      fi
      : > "$STANDIN/kubectl/$kind $namespace $name"
      fail_if_told after "apply $told"
      ;;
    get) if [ -f "$STANDIN/kubectl/$2 $namespace $3" ]; then echo "$2/$3"; fi ;;
    delete) rm -f "$STANDIN/kubectl/$2 $namespace $3" ;;
    list)
      release=${2#^}
      if [ -f "$STANDIN/helm/$namespace ${release%\$}" ]; then echo "${release%\$}"; fi
      ;;
    upgrade)
      fail_if_told before "helm upgrade"
      : > "$STANDIN/helm/$namespace $2"
      fail_if_told after "helm upgrade"
      ;;
    uninstall) rm "$STANDIN/helm/$namespace $2" ;;
  esac
  ;;
esac
