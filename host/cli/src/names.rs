//! Names that a person types.

use nodedock_proto::node::v1;

/// Splits `[NAMESPACE/]NAME`; the namespace is empty if there is none.
pub(super) fn split(name: &str) -> (String, String) {
    let (namespace, name) = name.split_once('/').unwrap_or(("", name));
    (namespace.to_owned(), name.to_owned())
}

/// Returns the object of `[NAMESPACE/]NAME`, by default in the namespace `default`.
pub(super) fn object(name: &str) -> v1::ObjectRef {
    let (namespace, name) = split(name);
    let namespace = if namespace.is_empty() {
        "default".to_owned()
    } else {
        namespace
    };
    v1::ObjectRef {
        namespace,
        name,
        uid: String::new(),
    }
}

/// Returns the request for claims of a name or UID; an empty name is every claim.
pub(super) fn claims(name: &str, with_timeline: bool) -> v1::ListClaimsRequest {
    let (namespace, name) = split(name);
    v1::ListClaimsRequest {
        namespace,
        name,
        with_timeline,
        with_ended: false,
    }
}

/// The same with the claims that ended within the last day.
pub(super) fn claims_and_ended(name: &str, with_timeline: bool) -> v1::ListClaimsRequest {
    v1::ListClaimsRequest {
        with_ended: true,
        ..claims(name, with_timeline)
    }
}

pub(super) fn unknown(kind: &str, name: &str) -> anyhow::Error {
    if kind == "node" {
        return anyhow::anyhow!(
            "this is not the node {name:?}; `nodedock get node` shows its name"
        );
    }
    let end = if kind.ends_with('s') { "es" } else { "s" };
    anyhow::anyhow!("there is no {kind} {name:?}; `nodedock get {kind}{end}` lists them")
}
