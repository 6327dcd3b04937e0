//! Users of a machine without a cluster, beside root: the members of a group have sockets of their own, and each has claims in a namespace of their own.

use std::collections::BTreeMap;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use nodedock_apiserver::{Access, Cause, Check, ObjectWrite, Server, status};
use serde_json::Value;
use tokio::net::UnixListener;

use crate::config::UsersConfig;
use crate::user_connections::{UserConnection, UserConnections};
use nodedock_base::directories::make;
use nodedock_kube::local::{CONSUMER_ANNOTATION, FINALIZER, PROCESS_ANNOTATION, user_namespace};

/// Mode of the directory of the sockets, and of the sockets.
const DIRECTORY_MODE: u32 = 0o750;
const SOCKET_MODE: u32 = 0o660;
/// Claims that a user may have. Each one that waits is tried again after every change.
const CLAIMS_MAX: usize = 256;
const CLAIMS: &str = "resourceclaims";
const CLASSES: &str = "deviceclasses";
/// Bytes of a claim of a user as JSON: all claims of many users fit into what the API may store.
const CLAIM_BYTES_MAX: usize = 64 << 10;
/// Processes and containers that a claim of a user may belong to. The daemon has a file descriptor for each.
const PROCESSES_MAX: usize = 16;
/// The parts of a claim that are refused.
const REQUESTS: &str = "spec.devices.requests";
const ANNOTATIONS: &str = "metadata.annotations";
const FINALIZERS: &str = "metadata.finalizers";

/// The sockets of users.
pub(super) struct UserSockets {
    pub(super) node_api: UnixListener,
    pub(super) api: UnixListener,
}

/// Returns the paths of the sockets: of the node API, and of the local API. They have the names of root's.
pub(super) fn paths(directory: &Path) -> [PathBuf; 2] {
    ["nodedock.sock", "api.sock"].map(|name| directory.join(name))
}

/// Makes the directory of the sockets, which the members of the group may enter.
///
/// # Errors
///
/// It cannot be made, or given to the group.
pub(super) fn make_directory(directory: &Path, users: &UsersConfig) -> Result<()> {
    let made = make(directory, DIRECTORY_MODE).map_err(anyhow::Error::from);
    made.and_then(|()| open_to(directory, users.group, DIRECTORY_MODE))
        .with_context(|| format!("make the directory {} for users", directory.display()))
}

/// Lets the members of the group connect to the sockets.
///
/// # Errors
///
/// They cannot be given to the group.
pub(super) fn open_sockets(directory: &Path, users: &UsersConfig) -> Result<()> {
    paths(directory).iter().try_for_each(|path| {
        open_to(path, users.group, SOCKET_MODE)
            .with_context(|| format!("let users connect to {}", path.display()))
    })
}

/// Gives a file to a group; the former group has no access at any time.
fn open_to(path: &Path, group: u32, mode: u32) -> Result<()> {
    if std::fs::metadata(path)?.gid() != group {
        std::fs::set_permissions(path, Permissions::from_mode(mode & 0o700))?;
        chown(path, None, Some(group))?;
    }
    Ok(std::fs::set_permissions(
        path,
        Permissions::from_mode(mode),
    )?)
}

/// Returns the local API as a user has it, whose namespace is made. `None`: it cannot be made, or the user may not connect.
pub(super) async fn server_of(
    server: Server,
    users: Arc<UsersConfig>,
    connections: UserConnections,
    uid: u32,
) -> Option<(Server, UserConnection)> {
    let connection = connections.enter(uid)?;
    let namespace = user_namespace(uid);
    if let Err(error) = server.ensure_namespace(&namespace).await {
        tracing::warn!(%error, namespace, "a namespace of a user cannot be made");
        return None;
    }
    let all = server.clone();
    let check = quota(move || claims(&all, &namespace), users);
    let server = server.with_access(access(uid)).with_check(check);
    Some((server, connection))
}

/// Lets a user use the claims of the own namespace, and read DeviceClasses.
fn access(uid: u32) -> Access {
    let namespace = user_namespace(uid);
    Arc::new(move |route| {
        let reads = ["get", "list", "watch"].contains(&route.verb);
        let may = match route.resource.plural {
            CLAIMS => route.namespace == namespace && (route.subresource.is_empty() || reads),
            CLASSES => reads,
            _ => false,
        };
        match may {
            true => Ok(()),
            false => Err(status::forbidden(route, route.resource.plural, &namespace)),
        }
    })
}

fn claims(server: &Server, namespace: &str) -> Vec<Arc<Value>> {
    let snapshot = server.decided();
    let Some(resource) = nodedock_apiserver::resource(CLAIMS) else {
        return Vec::new();
    };
    let claims = snapshot.objects(resource);
    let own = claims.filter(|(key, _)| key.namespace == namespace);
    own.map(|(_, claim)| claim.clone()).collect()
}

/// Refuses a claim beyond the quota. No other write happens meanwhile.
fn quota(
    claims: impl Fn() -> Vec<Arc<Value>> + Send + Sync + 'static,
    users: Arc<UsersConfig>,
) -> Check {
    Arc::new(move |_, write| match write {
        ObjectWrite::Created(claim) => {
            let quota = over_quota(&claims(), claim, &users);
            quota.into_iter().chain(too_large(claim)).collect()
        }
        // The devices that a claim asks for never change.
        ObjectWrite::Updated { new, old } => {
            let released = releases(new, old).then(|| {
                let why = "a claim keeps its devices until it is deleted and not in use";
                Cause::forbidden(FINALIZERS, why)
            });
            released.into_iter().chain(too_large(new)).collect()
        }
        ObjectWrite::Deleted(_) => Vec::new(),
    })
}

/// Returns whether a change lets an allocated claim go although it is in use.
fn releases(new: &Value, old: &Value) -> bool {
    let protects = |claim: &Value| {
        list(&claim["metadata"]["finalizers"])
            .iter()
            .any(|name| name == FINALIZER)
    };
    protects(old) && !protects(new)
}

/// Refuses a claim that takes too much of the daemon.
fn too_large(claim: &Value) -> Option<Cause> {
    let annotations = claim["metadata"]["annotations"].as_object();
    let keys = annotations
        .into_iter()
        .flat_map(|annotations| annotations.keys());
    let processes = keys
        .filter(|key| key.starts_with(PROCESS_ANNOTATION) || key.starts_with(CONSUMER_ANNOTATION));
    if processes.count() > PROCESSES_MAX {
        let why =
            format!("a claim of a user may belong to {PROCESSES_MAX} processes and containers");
        return Some(Cause::forbidden(ANNOTATIONS, &why));
    }
    (claim.to_string().len() > CLAIM_BYTES_MAX).then(|| {
        let why = format!("a claim of a user may have {CLAIM_BYTES_MAX} bytes");
        Cause::forbidden("metadata", &why)
    })
}

fn over_quota(claims: &[Arc<Value>], new: &Value, users: &UsersConfig) -> Option<Cause> {
    if claims.len() >= CLAIMS_MAX {
        let why = format!("a user may have {CLAIMS_MAX} claims");
        return Some(Cause::forbidden(REQUESTS, &why));
    }
    let new = Demand::of(new);
    let mut all = new.clone();
    claims.iter().for_each(|claim| all.add(&Demand::of(claim)));
    let limits = users.devices_by_class.iter();
    let by_class = limits.filter(|(class, _)| new.by_class.contains_key(*class));
    let by_class =
        by_class.map(|(class, most)| (all.by_class[class], *most, format!(" of class {class}")));
    let total = users.devices.map(|most| (all.total, most, String::new()));
    total.into_iter().chain(by_class).find_map(|(asked, most, of)| {
        let why = match asked {
            Some(asked) if asked <= u64::from(most) => return None,
            Some(asked) => format!("the claims of a user may ask for {most} devices{of}, and with this one they ask for {asked}"),
            None => format!("the claims of a user may ask for {most} devices{of}, and one asks for all devices"),
        };
        Some(Cause::forbidden(REQUESTS, &why))
    })
}

/// Devices that claims ask for at most. `None`: all that there are.
#[derive(Debug, Clone, PartialEq)]
struct Demand {
    total: Option<u64>,
    by_class: BTreeMap<String, Option<u64>>,
}

impl Default for Demand {
    fn default() -> Self {
        Self {
            total: Some(0),
            by_class: BTreeMap::new(),
        }
    }
}

impl Demand {
    /// Returns the demand of a claim. Of alternatives each counts for its class, and the largest for the total.
    fn of(claim: &Value) -> Self {
        let mut demand = Self::default();
        for request in list(&claim["spec"]["devices"]["requests"]) {
            let exact = &request["exactly"];
            let alternatives = match exact.is_null() {
                true => list(&request["firstAvailable"]),
                false => std::slice::from_ref(exact),
            };
            let mut largest = Some(0);
            for one in alternatives {
                let count = count(one);
                largest = largest.zip(count).map(|(a, b)| a.max(b));
                let class = one["deviceClassName"].as_str().unwrap_or_default();
                let known = demand.by_class.entry(class.to_owned()).or_insert(Some(0));
                *known = sum(*known, count);
            }
            demand.total = sum(demand.total, largest);
        }
        demand
    }

    fn add(&mut self, other: &Self) {
        self.total = sum(self.total, other.total);
        for (class, count) in &other.by_class {
            let known = self.by_class.entry(class.clone()).or_insert(Some(0));
            *known = sum(*known, *count);
        }
    }
}

fn sum(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    a.zip(b).map(|(a, b)| a.saturating_add(b))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn count(request: &Value) -> Option<u64> {
    match request["allocationMode"].as_str() {
        Some("All") => None,
        _ => Some(request["count"].as_u64().unwrap_or(1)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(requests: Value) -> Arc<Value> {
        Arc::new(json!({ "spec": { "devices": { "requests": requests } } }))
    }

    fn exactly(class: &str, count: u64) -> Value {
        json!({ "name": "r", "exactly": { "deviceClassName": class, "count": count } })
    }

    fn refusal(claims: &[Arc<Value>], new: Value, users: &UsersConfig) -> Option<String> {
        over_quota(claims, &claim(json!([new])), users).map(|cause| cause.message)
    }

    #[test]
    fn large_and_released_claims_are_refused() {
        let with = |annotations: usize, finalizers: Value, label: &str| {
            let annotations: serde_json::Map<_, _> = (0..annotations)
                .map(|number| (format!("consumer.nodedock.dev/{number}"), json!("{}")))
                .collect();
            json!({ "metadata": { "annotations": annotations, "finalizers": finalizers, "labels": { "a": label } } })
        };
        assert!(too_large(&with(PROCESSES_MAX, json!([]), "")).is_none());
        let many = too_large(&with(PROCESSES_MAX + 1, json!([]), "")).unwrap();
        assert_eq!(many.field, ANNOTATIONS);
        let long = too_large(&with(0, json!([]), &"x".repeat(CLAIM_BYTES_MAX))).unwrap();
        assert!(long.message.contains("65536 bytes"), "{}", long.message);
        let (kept, gone) = (
            with(0, json!([FINALIZER, "own"]), ""),
            with(0, json!(["own"]), ""),
        );
        assert!(releases(&gone, &kept) && !releases(&kept, &kept) && !releases(&kept, &gone));
    }

    #[test]
    fn quota_counts_all_claims() {
        let users = UsersConfig {
            group: 1,
            devices: Some(4),
            devices_by_class: BTreeMap::from([("gpu".to_owned(), 2)]),
        };
        let one = claim(json!([exactly("gpu", 1)]));
        let claims = [one.clone(), claim(json!([exactly("nic", 1)]))];
        assert_eq!(refusal(&claims, exactly("gpu", 1), &users), None);
        let gpus = refusal(&claims, exactly("gpu", 2), &users).unwrap();
        assert!(
            gpus.contains("2 devices of class gpu") && gpus.contains("ask for 3"),
            "{gpus}"
        );
        let total = refusal(&claims, exactly("nic", 3), &users).unwrap();
        assert!(
            total.contains("4 devices,") && total.contains("ask for 5"),
            "{total}"
        );
        let all = json!({ "name": "r", "exactly": { "deviceClassName": "nic", "allocationMode": "All" } });
        assert!(
            refusal(&claims, all, &users)
                .unwrap()
                .contains("all devices")
        );
        let alternatives = json!({ "name": "r", "firstAvailable": [
            { "name": "a", "deviceClassName": "gpu", "count": 2 }, { "name": "b", "deviceClassName": "nic", "count": 1 },
        ] });
        assert!(
            refusal(&[one], alternatives.clone(), &users)
                .unwrap()
                .contains("class gpu")
        );
        assert_eq!(refusal(&[], alternatives, &users), None);
        let many = vec![claim(json!([])); CLAIMS_MAX];
        assert!(
            refusal(&many, exactly("nic", 1), &users)
                .unwrap()
                .contains("256 claims")
        );
    }
}
