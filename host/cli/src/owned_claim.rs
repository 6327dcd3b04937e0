//! Claims of the local API that belong to processes: of `run-with`, and of containers.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nodedock_base::process::Process;
use nodedock_kube::client::ErrorKind;
use nodedock_kube::local::{FINALIZER, PROCESS_ANNOTATION};
use nodedock_kube::local_client::{LocalClient, ObjectError};
use nodedock_model::{ObjectRef, ProblemCode};
use nodedock_proto::node::v1;
use nodedockd::convert;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::client::{connect, is_connection_error, is_interrupted, is_not_allocated};
use super::local_api::text;
use super::output::print_error;
use super::pods::request_for;
use super::{CommandError, Location, claim};

/// Time for a daemon that is being restarted to answer again.
pub(super) const DAEMON_WAIT: Duration = Duration::from_secs(60);
pub(super) const DAEMON_RETRY: Duration = Duration::from_millis(200);

/// Time after which a wait for devices is looked at, doubled up to the second.
const WAIT_LOOK_MIN: Duration = Duration::from_secs(2);
const WAIT_LOOK_MAX: Duration = Duration::from_secs(30);

/// Least time for a claim to be decided.
const DECISION_WAIT: Duration = Duration::from_secs(1);

/// Pause between looks for a decision.
const DECISION_LOOK: Duration = Duration::from_millis(50);

/// Time that the end of the claim is waited for, so that its devices are free when the caller ends.
const END_WAIT: Duration = Duration::from_secs(10);

/// Digits, of sixteen, that tell the names of claims apart.
const NAME_DIGITS: usize = 12;

/// A claim that ends with the processes in its annotations.
pub(super) struct OwnedClaim {
    pub(super) id: ObjectRef,
}

/// A claim to be made.
pub(super) struct NewClaim {
    pub(super) name: String,
    /// Those by which it belongs to processes, and more.
    pub(super) annotations: Vec<(String, String)>,
    /// Object or null.
    pub(super) labels: Value,
    pub(super) spec: Value,
}

/// Time for which the devices of a claim are waited for.
#[derive(Clone, Copy)]
pub(super) struct DeviceWait {
    /// `None`: without end.
    pub(super) most: Option<Duration>,
    /// Time for a daemon that is being restarted to answer again.
    pub(super) daemon: Duration,
    /// Writes why it is waited for, whenever that changes.
    pub(super) report: fn(&str),
    /// Whether devices are waited for that the machine does not have: of a class that does not exist, or that no selector matches.
    pub(super) waits_for_missing: bool,
}

/// Devices of a prepared claim.
pub(super) struct PreparedDevices {
    /// CDI names.
    pub(super) names: Vec<String>,
    /// Directories of the CDI files that have them.
    pub(super) directories: Vec<PathBuf>,
}

/// Returns a name that no other claim has.
pub(super) fn new_name(prefix: &str) -> String {
    let id = Uuid::new_v4().simple().to_string();
    format!("{prefix}-{}", id.get(..NAME_DIGITS).unwrap_or(&id))
}

impl OwnedClaim {
    /// Makes a claim; once, also if a daemon that crashes meanwhile does not answer that it did.
    ///
    /// # Errors
    ///
    /// Another claim has the name; the local API refuses the claim, or is not there in time.
    pub(super) async fn make(
        client: &LocalClient,
        namespace: &str,
        claim: NewClaim,
        daemon_wait: Duration,
    ) -> Result<Self> {
        let name = &claim.name;
        let annotations: serde_json::Map<_, _> = claim
            .annotations
            .into_iter()
            .map(|(key, value)| (key, value.into()))
            .collect();
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            // The daemon would add the finalizer before it allocates the claim: one write less.
            "metadata": {
                "name": name, "annotations": annotations, "labels": claim.labels, "finalizers": [FINALIZER],
            },
            "spec": claim.spec,
        });
        let began = Instant::now();
        loop {
            match client.create(&object, namespace).await {
                Ok(made) => return Self::of(&made),
                Err(ObjectError::Api(error)) if error.kind == ErrorKind::Conflict => {
                    let known = client.claim(namespace, name).await?;
                    let known = known.with_context(|| format!("claim {name} is gone already"))?;
                    let has = |(key, value): (&String, &Value)| {
                        known["metadata"]["annotations"][key] == *value
                    };
                    if !annotations.iter().all(has) {
                        bail!("there is a claim {namespace}/{name} already");
                    }
                    return Self::of(&known);
                }
                Err(ObjectError::Api(error))
                    if error.is_unreachable() && began.elapsed() < daemon_wait =>
                {
                    sleep(DAEMON_RETRY).await;
                }
                Err(error) => return Err(anyhow::Error::from(error).context("make a claim")),
            }
        }
    }

    /// Returns the claim of an object.
    pub(super) fn of(object: &Value) -> Result<Self> {
        let field = |name: &str| text(object, &format!("/metadata/{name}"));
        let id = ObjectRef::new(field("namespace"), field("name"), field("uid"));
        Ok(Self {
            id: id.context("the local API named the claim wrongly")?,
        })
    }

    /// Returns `NAMESPACE/NAME`.
    pub(super) fn name(&self) -> String {
        format!("{}/{}", self.id.namespace, self.id.name)
    }

    /// Returns whether processes run to which the claim belongs, other than these, by number.
    pub(super) async fn has_others(&self, client: &LocalClient, own: &[i32]) -> Result<bool> {
        let (namespace, name) = (self.id.namespace.as_str(), self.id.name.as_str());
        match client.claim(namespace, name).await? {
            Some(claim) => has_processes(&claim, own),
            None => Ok(false),
        }
    }

    /// Ends it. What fails here is done by the daemon when the processes have ended.
    pub(super) async fn end(&self, location: &Location, client: &LocalClient) {
        let (namespace, name, uid) = (
            self.id.namespace.as_str(),
            self.id.name.as_str(),
            self.id.uid.as_str(),
        );
        let work = async {
            let pod = Some(v1::ObjectRef {
                uid: uid.to_owned(),
                ..Default::default()
            });
            let mut daemon = connect(location).await?;
            let answer = daemon
                .unprepare_pod(v1::UnpreparePodRequest { pod })
                .await?
                .into_inner();
            client.delete_claim(namespace, name, Some(uid)).await?;
            if let Some(problem) = answer.claims.into_iter().find_map(|claim| claim.problem) {
                bail!(problem.message);
            }
            client.until_gone(namespace, name, uid, END_WAIT).await;
            Ok(())
        };
        let failed = match timeout(END_WAIT, work).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => "the daemon did not answer in time".to_owned(),
        };
        print_error(&format!(
            "warning: the daemon ends claim {}: {failed}",
            self.name()
        ));
    }

    /// Waits for the devices, and prepares them for a pod; without one for a pod with the identity of the claim, which needs no object.
    ///
    /// The daemon itself waits for the allocation, so usually one request does both.
    pub(super) async fn prepare(
        &self,
        location: &Location,
        pod: Option<&ObjectRef>,
        wait: DeviceWait,
    ) -> Result<PreparedDevices> {
        let began = Instant::now();
        let end = wait.most.map(|most| began + most.max(DECISION_LOOK));
        let mut prepared = pin!(self.prepare_allocated(location, pod, end, wait.daemon));
        let (mut pause, mut shown) = (WAIT_LOOK_MIN, String::new());
        loop {
            let next = Instant::now() + pause;
            let next = end.map_or(next, |end| end.min(next));
            let look = async {
                sleep_until(next).await;
                self.waiting(location).await
            };
            let waiting = tokio::select! {
                biased;
                prepared = &mut prepared => return prepared,
                waiting = look => waiting,
            };
            let is_over = end.is_some_and(|end| Instant::now() >= end);
            match waiting {
                Ok(Some(waiting)) if is_over || (waiting.never && !wait.waits_for_missing) => {
                    bail!("there are no devices: {}", reason(&waiting));
                }
                Err(error) if is_over && !is_away(&error) => {
                    return Err(error.context("wait for devices"));
                }
                // It is allocated, or the daemon says soon that it is not; one that is restarted as soon as it answers.
                Ok(None) | Err(_) if is_over => return prepared.await,
                Ok(None) | Err(_) => {}
                Ok(Some(waiting)) => {
                    let reason = reason(&waiting);
                    if reason != shown {
                        (wait.report)(&format!("{} waits for devices: {reason}", self.name()));
                        shown = reason;
                    }
                }
            }
            pause = (pause * 2).min(WAIT_LOOK_MAX);
        }
    }

    /// Prepares it when it is allocated; after the end only if it is by then.
    async fn prepare_allocated(
        &self,
        location: &Location,
        pod: Option<&ObjectRef>,
        end: Option<Instant>,
        daemon_wait: Duration,
    ) -> Result<PreparedDevices> {
        let pod = pod.unwrap_or(&self.id).clone();
        let request = convert::pod_message(&request_for(pod, vec![self.id.name.clone()]), &[]);
        let mut away_since = None;
        let answer = loop {
            // A request may be repeated at any time.
            let answer = match connect(location).await {
                Ok(mut daemon) => daemon
                    .prepare_pod(request.clone())
                    .await
                    .map(|answer| answer.into_inner())
                    .map_err(anyhow::Error::from),
                Err(error) => Err(error.into()),
            };
            let error = match answer {
                Ok(answer) => match answer.claims.iter().find_map(interruption) {
                    None => break answer,
                    Some(message) => anyhow!("claim {} is not prepared: {message}", self.name()),
                },
                Err(error) if is_away(&error) => error,
                Err(error) => {
                    // The daemon has waited for a while.
                    let is_not_allocated = error.downcast_ref().is_some_and(is_not_allocated);
                    if !is_not_allocated || end.is_some_and(|end| Instant::now() >= end) {
                        return Err(error);
                    }
                    away_since = None;
                    continue;
                }
            };
            let since = *away_since.get_or_insert_with(Instant::now);
            if since.elapsed() >= daemon_wait {
                return Err(error);
            }
            sleep(DAEMON_RETRY).await;
        };
        if let Some(problem) = answer.claims.into_iter().find_map(|claim| claim.problem) {
            bail!("claim {} is not prepared: {}", self.name(), problem.message);
        }
        let containers = answer.containers.into_iter();
        Ok(PreparedDevices {
            names: containers
                .flat_map(|container| container.cdi_devices)
                .collect(),
            directories: answer
                .cdi_directories
                .into_iter()
                .map(PathBuf::from)
                .collect(),
        })
    }

    /// Returns why it is not allocated. `None`: it is, or that is not decided in time.
    async fn waiting(&self, location: &Location) -> Result<Option<v1::WaitingClaim>> {
        let began = Instant::now();
        loop {
            match claim::waiting(location, &self.name()).await? {
                None if began.elapsed() < DECISION_WAIT => sleep(DECISION_LOOK).await,
                waiting => return Ok(waiting),
            }
        }
    }
}

/// Returns whether processes run to which a claim belongs, other than these, by number.
pub(super) fn has_processes(claim: &Value, own: &[i32]) -> Result<bool> {
    let annotations = claim.pointer("/metadata/annotations");
    for (key, value) in annotations.and_then(Value::as_object).into_iter().flatten() {
        if !key.starts_with(PROCESS_ANNOTATION) {
            continue;
        }
        let process: Process = serde_json::from_str(value.as_str().unwrap_or_default())
            .with_context(|| {
                format!(
                    "annotation {key} of claim {}",
                    text(claim, "/metadata/name")
                )
            })?;
        if !own.contains(&process.pid) && process.is_running()? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns why a claim waits, as one sentence.
fn reason(waiting: &v1::WaitingClaim) -> String {
    let mut reason = waiting.reason.clone();
    if !waiting.holders.is_empty() {
        reason += &format!("; claims with such devices: {}", waiting.holders.join(", "));
    }
    match waiting.place {
        0 | 1 => {}
        2 => reason += "; 1 claim waits before it",
        place => reason += &format!("; {} claims wait before it", place - 1),
    }
    reason
}

/// Returns whether the daemon is not there to answer, or stopped before it could.
pub(super) fn is_away(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CommandError::Unreachable { .. }))
        || error
            .downcast_ref()
            .is_some_and(|status| is_connection_error(status) || is_interrupted(status))
}

/// Returns the message of a claim whose prepare did not end because the daemon stops: the next instance prepares it.
fn interruption(claim: &v1::ClaimOutcome) -> Option<&str> {
    let problem = claim.problem.as_ref()?;
    (problem.code == ProblemCode::Interrupted.as_str()).then_some(&problem.message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopping_daemon_is_no_refusal() {
        let outcome = |code: Option<ProblemCode>| v1::ClaimOutcome {
            problem: code.map(|code| v1::Problem {
                code: code.to_string(),
                message: "why".to_owned(),
                ..v1::Problem::default()
            }),
            ..v1::ClaimOutcome::default()
        };
        let interrupted = outcome(Some(ProblemCode::Interrupted));
        assert_eq!(interruption(&interrupted), Some("why"));
        assert_eq!(interruption(&outcome(Some(ProblemCode::DeviceHeld))), None);
        assert_eq!(interruption(&outcome(None)), None);
    }
}
