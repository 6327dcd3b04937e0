//! Claims that belong to processes: when the last one has ended, the claim's pods are unprepared and the claim is deleted.
//!
//! The processes are annotations of the claim, so that they outlive the daemon, which opens their descriptors again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, ResourceExt};
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::{PreparedClaims, View};
use crate::client::{ApiError, ErrorKind, KubeClient};
use nodedock_base::backoff::Backoff;
use nodedock_base::error::chain;
use nodedock_base::process::{Process, ProcessError};
use nodedock_model::Problem;

/// Prefix of the annotations of a claim that name the processes it belongs to.
pub const PROCESS_ANNOTATION: &str = "process.nodedock.dev/";

/// Prefix of the annotations of a claim that name the first processes of containers that use it, by the UID of their pods: the claim outlives them.
pub const CONSUMER_ANNOTATION: &str = "consumer.nodedock.dev/";

/// Pause after an unprepare that failed, doubled up to the second.
const RETRY_MIN: Duration = Duration::from_millis(200);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The annotation of the process that makes a claim for a container, until the container has a process of its own.
pub const CREATOR_ANNOTATION: &str = "process.nodedock.dev/creator";

/// Returns the annotation that makes a claim belong to a process.
pub fn annotation_of(process: &Process) -> (String, String) {
    let value = serde_json::to_string(process).unwrap_or_default();
    (format!("{PROCESS_ANNOTATION}{}", process.pid), value)
}

/// Returns the processes with annotations of this prefix, by the rest of the key. An annotation that cannot be read is a process whose end cannot
/// be seen.
fn processes_of(claim: &ResourceClaim, prefix: &str) -> BTreeMap<String, ProcessOrError> {
    let annotations = claim.annotations().iter();
    let processes = annotations.filter_map(|(key, value)| {
        let process = serde_json::from_str(value).map_err(|error| format!("{key}: {error}"));
        Some((key.strip_prefix(prefix)?.to_owned(), process))
    });
    processes.collect()
}

type ProcessOrError = Result<Process, String>;

/// What ends with processes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Ends {
    /// The claim, with all of them.
    Claim,
    /// The use of the claim by the pod with this UID, with its process.
    Consumer(String),
}

impl Ends {
    /// Returns the UID of the pod whose use ends. `None`: the whole claim ends.
    fn consumer(&self) -> Option<&str> {
        match self {
            Self::Claim => None,
            Self::Consumer(pod) => Some(pod),
        }
    }
}

/// Returns what of a claim ends with which processes.
fn ends_of(claim: &ResourceClaim) -> BTreeMap<Ends, BTreeSet<ProcessOrError>> {
    let owners: BTreeSet<_> = processes_of(claim, PROCESS_ANNOTATION)
        .into_values()
        .collect();
    let consumers = processes_of(claim, CONSUMER_ANNOTATION)
        .into_iter()
        .map(|(pod, process)| (Ends::Consumer(pod), BTreeSet::from([process])));
    let claim = (!owners.is_empty()).then_some((Ends::Claim, owners));
    claim.into_iter().chain(consumers).collect()
}

/// Processes that are waited for.
struct Followed {
    processes: BTreeSet<ProcessOrError>,
    task: tokio::task::AbortHandle,
}

/// Waits for the processes of all claims, without end.
pub(super) async fn follow(
    client: KubeClient,
    mut views: watch::Receiver<Arc<View>>,
    prepared: Arc<dyn PreparedClaims>,
) {
    let mut tasks = JoinSet::new();
    let mut followed: BTreeMap<(String, Ends), Followed> = BTreeMap::new();
    loop {
        let view = views.borrow_and_update().clone();
        let mut here = BTreeSet::new();
        for (_, claim) in view.annotated() {
            let Some(uid) = claim.uid() else {
                continue;
            };
            for (ends, processes) in ends_of(claim) {
                let key = (uid.clone(), ends.clone());
                here.insert(key.clone());
                if followed
                    .get(&key)
                    .is_some_and(|known| known.processes == processes)
                {
                    continue;
                }
                let parts = (client.clone(), claim.clone(), prepared.clone());
                let task = tasks.spawn(end_with(parts, ends, processes.clone()));
                if let Some(before) = followed.insert(key, Followed { processes, task }) {
                    before.task.abort();
                }
            }
        }
        followed.retain(|key, followed| {
            let stays = here.contains(key);
            if !stays {
                followed.task.abort();
            }
            stays
        });
        while tasks.try_join_next().is_some() {}
        if views.changed().await.is_err() {
            return;
        }
    }
}

/// Waits for the end of all processes, and then ends what is for them.
async fn end_with(
    (client, claim, prepared): (KubeClient, Arc<ResourceClaim>, Arc<dyn PreparedClaims>),
    ends: Ends,
    processes: BTreeSet<ProcessOrError>,
) {
    let (namespace, name) = (claim.namespace().unwrap_or_default(), claim.name_any());
    for process in processes {
        let ended = match &process {
            Ok(process) => until_ended(|| process.ended()).await,
            Err(unreadable) => Err(unreadable.clone()),
        };
        if let Err(why) = ended {
            tracing::warn!(
                namespace,
                claim = name,
                why,
                "the claim stays until it is deleted by hand"
            );
            return std::future::pending().await;
        }
    }
    let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
    loop {
        let ended = match &ends {
            Ends::Claim => end(&client, &claim, &*prepared).await,
            Ends::Consumer(pod) => end_use(&client, &claim, pod, &*prepared).await,
        };
        match ended {
            Ok(true) => break,
            Ok(false) => {}
            Err(problem) => {
                let why = "the processes of the claim have ended, and it has not";
                tracing::warn!(namespace, claim = name, %problem, why);
            }
        }
        sleep(backoff.delay()).await;
    }
    tracing::info!(
        namespace,
        claim = name,
        consumer = ends.consumer(),
        "the claim or a use of it ends with its processes"
    );
}

/// Unprepares the pod of a container that has ended, and removes the container from the claim. Returns whether it is done.
async fn end_use(
    client: &KubeClient,
    claim: &ResourceClaim,
    pod: &str,
    prepared: &dyn PreparedClaims,
) -> Result<bool, Problem> {
    let uid = claim.uid().unwrap_or_default();
    prepared.unprepare_user(&uid, pod).await?;
    let claims =
        Api::<ResourceClaim>::namespaced(client.client(), &claim.namespace().unwrap_or_default());
    let key = format!("{CONSUMER_ANNOTATION}{pod}");
    let patch = json!({ "metadata": { "uid": claim.uid(), "annotations": { key: null } } });
    let patched = claims
        .patch(
            &claim.name_any(),
            &PatchParams::default(),
            &Patch::Merge(patch),
        )
        .await;
    match patched.map_err(ApiError::from) {
        Ok(_) => Ok(true),
        // Another claim of its name, or none.
        Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Conflict) => Ok(true),
        Err(error) => Err(error.problem()),
    }
}

/// Waits for the end of a process, and retries what may pass, such as a lack of file descriptors. Fails if the end can never be seen here.
async fn until_ended<F>(ended: impl Fn() -> F) -> Result<(), String>
where
    F: Future<Output = Result<(), ProcessError>>,
{
    let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX);
    let mut is_reported = false;
    loop {
        match ended().await {
            Ok(()) => return Ok(()),
            Err(error @ ProcessError::OtherNamespace(_)) => return Err(chain(&error)),
            Err(error @ ProcessError::Io { .. }) => {
                if !std::mem::replace(&mut is_reported, true) {
                    tracing::warn!(
                        error = chain(&error),
                        "a process of a claim cannot be watched, retrying"
                    );
                }
                sleep(backoff.delay()).await;
            }
        }
    }
}

/// Deletes the claim, so that no process and no pod is added to it, and then unprepares it. Returns whether it is gone, or belongs to more
/// processes than were waited for, which the task that follows them sees as well.
async fn end(
    client: &KubeClient,
    claim: &ResourceClaim,
    prepared: &dyn PreparedClaims,
) -> Result<bool, Problem> {
    let claims =
        Api::<ResourceClaim>::namespaced(client.client(), &claim.namespace().unwrap_or_default());
    let current = match claims.get(&claim.name_any()).await.map_err(ApiError::from) {
        Ok(current) if current.uid() == claim.uid() => current,
        Ok(_) => return Ok(true),
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(true),
        Err(error) => return Err(error.problem()),
    };
    if current.metadata.deletion_timestamp.is_none() {
        let processes = |of| processes_of(of, PROCESS_ANNOTATION);
        if processes(&current) != processes(claim) {
            return Ok(true);
        }
        let resource_version = current.resource_version();
        let same = Preconditions {
            uid: claim.uid(),
            resource_version,
        };
        let deleted = claims
            .delete(
                &claim.name_any(),
                &DeleteParams::default().preconditions(same),
            )
            .await;
        match deleted.map_err(ApiError::from) {
            Ok(_) => {}
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Conflict) => {
                return Ok(false);
            }
            Err(error) => return Err(error.problem()),
        }
    }
    // A prepare that is under way shows its pods in a later round.
    prepared
        .unprepare_users(&claim.uid().unwrap_or_default())
        .await?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn process_watch_retries_unless_elsewhere() {
        let attempts = AtomicU32::new(0);
        let failing = || {
            std::future::ready(match attempts.fetch_add(1, Relaxed) {
                0..3 => Err(ProcessError::Io {
                    pid: 1,
                    source: io::Error::from_raw_os_error(24),
                }),
                _ => Ok(()),
            })
        };
        assert_eq!(until_ended(failing).await, Ok(()));
        assert_eq!(attempts.load(Relaxed), 4);
        let elsewhere =
            until_ended(|| std::future::ready(Err(ProcessError::OtherNamespace(7)))).await;
        assert!(
            elsewhere
                .unwrap_err()
                .contains("process 7 is in another PID namespace")
        );
    }
}
