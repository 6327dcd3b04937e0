//! What containers may name: the DeviceClasses, and the claims.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::View;
use super::processes::PROCESS_ANNOTATION;
use nodedock_base::rest::rest_after;
use nodedock_model::ObjectRef;

/// Namespace of the claims that containers may name.
pub const CONTAINER_NAMESPACE: &str = "default";

/// Prefix of the namespaces of users other than root.
const USER_PREFIX: &str = "user-";

/// Returns the namespace of the claims of a user other than root.
pub fn user_namespace(uid: u32) -> String {
    format!("{USER_PREFIX}{uid}")
}

/// Names of classes and claims.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct LocalNames {
    /// By DeviceClass: the claims of the namespace [`CONTAINER_NAMESPACE`] and of users that request devices of it and do not end with
    /// processes.
    pub classes: BTreeMap<String, BTreeSet<String>>,
    /// Claims that end with processes.
    pub of_processes: Vec<ObjectRef>,
}

impl LocalNames {
    pub(super) fn of(view: &View) -> Self {
        let classes = view.classes.iter().cloned();
        let mut names = Self {
            classes: classes.map(|class| (class, BTreeSet::new())).collect(),
            of_processes: Vec::new(),
        };
        for ((namespace, name), claim) in &view.claims {
            if ends_with_processes(claim) {
                let uid = claim.uid().unwrap_or_default();
                names
                    .of_processes
                    .extend(ObjectRef::new(namespace, name, &uid));
            } else if namespace == CONTAINER_NAMESPACE || namespace.starts_with(USER_PREFIX) {
                for class in classes_of(claim) {
                    if let Some(claims) = names.classes.get_mut(class) {
                        claims.insert(name.clone());
                    }
                }
            }
        }
        names
    }
}

/// Listener to changes of names.
pub struct NamesListener {
    pub(super) views: watch::Receiver<Arc<View>>,
    pub(super) last: Option<LocalNames>,
}

impl NamesListener {
    /// Returns the names, the first time as they are and then after a change. `None`: there are no more changes.
    pub async fn next(&mut self) -> Option<LocalNames> {
        loop {
            let began = Instant::now();
            let names = LocalNames::of(&self.views.borrow_and_update().clone());
            let rest = rest_after(began, Duration::ZERO);
            if self.last.as_ref() != Some(&names) {
                self.last = Some(names.clone());
                return Some(names);
            }
            // no error: without a sender the daemon ends
            self.views.changed().await.ok()?;
            sleep(rest).await;
        }
    }
}

/// Returns whether a claim is of a user other than root.
pub(super) fn is_of_user(claim: &ResourceClaim) -> bool {
    let namespace = claim.metadata.namespace.as_deref();
    namespace.is_some_and(is_user_namespace)
}

/// Returns whether the claims of a namespace are of a user other than root.
pub(super) fn is_user_namespace(namespace: &str) -> bool {
    namespace.starts_with(USER_PREFIX)
}

pub(super) fn ends_with_processes(claim: &ResourceClaim) -> bool {
    let mut annotations = claim.annotations().keys();
    annotations.any(|key| key.starts_with(PROCESS_ANNOTATION))
}

fn classes_of(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let requests = claim.spec.devices.iter();
    let requests = requests.flat_map(|devices| devices.requests.iter().flatten());
    requests.flat_map(|request| {
        let exact = request.exactly.iter().map(|exact| &exact.device_class_name);
        let alternatives = request.first_available.iter().flatten();
        let alternatives = alternatives.map(|request| &request.device_class_name);
        exact.chain(alternatives).map(String::as_str)
    })
}
