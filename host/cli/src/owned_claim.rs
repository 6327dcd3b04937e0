//! Claims of the local API that belong to processes: of `run-with`, and of containers.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use nodedock_base::process::Process;
use nodedock_kube::client::ErrorKind;
use nodedock_kube::local::PROCESS_ANNOTATION;
use nodedock_kube::local_client::{LocalClient, ObjectError};
use nodedock_model::ObjectRef;
use nodedock_proto::node::v1;
use nodedockd::convert;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use uuid::Uuid;

use super::client::{connect, is_connection_error};
use super::local_api::text;
use super::output::print_error;
use super::pods::request_for;
use super::{CommandError, Location, claim};

/// Time for a daemon that is being restarted to answer again.
pub(super) const DAEMON_WAIT: Duration = Duration::from_secs(60);
pub(super) const DAEMON_RETRY: Duration = Duration::from_millis(200);

/// Time after which a wait for devices is reported.
const WAIT_REPORTED: Duration = Duration::from_secs(2);

/// Least time for a claim to be decided.
const DECISION_WAIT: Duration = Duration::from_secs(1);

/// Time that the end of the claim is waited for, so that its devices are free when the caller ends.
const END_WAIT: Duration = Duration::from_secs(10);

/// Digits, of sixteen, that tell the names of claims apart.
const NAME_DIGITS: usize = 12;

/// A claim that ends with the processes in its annotations.
pub(super) struct OwnedClaim {
    pub(super) id: ObjectRef,
}

/// Time for which the devices of a claim are waited for.
#[derive(Clone, Copy)]
pub(super) struct DeviceWait {
    /// `None`: without end.
    pub(super) most: Option<Duration>,
    /// Whether a wait is printed.
    pub(super) is_reported: bool,
}

impl OwnedClaim {
    /// Makes a claim of this metadata and spec, with a name that begins with `prefix`; once, also if a daemon that crashes meanwhile does not
    /// answer that it did.
    pub(super) async fn make(
        client: &LocalClient,
        namespace: &str,
        prefix: &str,
        annotations: &[(String, String)],
        spec: Value,
    ) -> Result<Self> {
        let id = Uuid::new_v4().simple().to_string();
        let name = format!("{prefix}-{}", id.get(..NAME_DIGITS).unwrap_or(&id));
        let annotations: BTreeMap<_, _> = annotations.iter().cloned().collect();
        let claim = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": name, "annotations": annotations },
            "spec": spec,
        });
        let began = Instant::now();
        loop {
            match client.create(&claim, namespace).await {
                Ok(made) => return Self::of(&made),
                Err(ObjectError::Api(error)) if error.kind == ErrorKind::Conflict => {
                    let made = client.claim(namespace, &name).await?;
                    return Self::of(&made.context("it is gone already")?);
                }
                Err(ObjectError::Api(error))
                    if error.is_unreachable() && began.elapsed() < DAEMON_WAIT =>
                {
                    sleep(DAEMON_RETRY).await;
                }
                Err(error) => return Err(error.into()),
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
        let Some(claim) = client.claim(namespace, name).await? else {
            return Ok(false);
        };
        let annotations = claim.pointer("/metadata/annotations");
        for (key, value) in annotations.and_then(Value::as_object).into_iter().flatten() {
            if !key.starts_with(PROCESS_ANNOTATION) {
                continue;
            }
            let process: Process = serde_json::from_str(value.as_str().unwrap_or_default())
                .with_context(|| format!("annotation {key} of claim {}", self.name()))?;
            if !own.contains(&process.pid) && process.is_running()? {
                return Ok(true);
            }
        }
        Ok(false)
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
                anyhow::bail!(problem.message);
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

    /// Waits for the devices, and prepares them for a pod; without one for a pod with the identity of the claim, which needs no object. Returns
    /// their CDI names.
    pub(super) async fn prepare(
        &self,
        location: &Location,
        client: &LocalClient,
        pod: Option<&ObjectRef>,
        wait: DeviceWait,
    ) -> Result<Vec<String>> {
        self.wait_for_devices(location, client, wait).await?;
        let pod = pod.unwrap_or(&self.id).clone();
        let request = convert::pod_message(&request_for(pod, vec![self.id.name.clone()]), &[]);
        let began = Instant::now();
        let answer = loop {
            // A request may be repeated at any time.
            let answer = match connect(location).await {
                Ok(mut daemon) => daemon
                    .prepare_pod(request.clone())
                    .await
                    .map_err(anyhow::Error::from),
                Err(error) => Err(error.into()),
            };
            match answer {
                Ok(answer) => break answer.into_inner(),
                Err(error) if is_away(&error) && began.elapsed() < DAEMON_WAIT => {
                    sleep(DAEMON_RETRY).await
                }
                Err(error) => return Err(error),
            }
        };
        if let Some(problem) = answer.claims.into_iter().find_map(|claim| claim.problem) {
            anyhow::bail!("claim {} is not prepared: {}", self.name(), problem.message);
        }
        let containers = answer.containers.into_iter();
        Ok(containers
            .flat_map(|container| container.cdi_devices)
            .collect())
    }

    async fn wait_for_devices(
        &self,
        location: &Location,
        client: &LocalClient,
        wait: DeviceWait,
    ) -> Result<()> {
        let (namespace, name) = (self.id.namespace.as_str(), self.id.name.as_str());
        let mut allocated = std::pin::pin!(client.until_allocated(namespace, name));
        let first = wait.most.map_or(WAIT_REPORTED, |most| {
            most.clamp(DECISION_WAIT, WAIT_REPORTED)
        });
        let found = match timeout(first, &mut allocated).await {
            Ok(found) => found,
            Err(_) => {
                let rest = wait.most.map(|most| most.saturating_sub(first));
                if wait.is_reported && rest != Some(Duration::ZERO) {
                    let why = self.reason(location).await;
                    print_error(&format!("waiting for devices: {why}"));
                }
                match rest {
                    None => allocated.await,
                    Some(rest) => match timeout(rest, allocated).await {
                        Ok(found) => found,
                        Err(_) => {
                            anyhow::bail!("there are no devices: {}", self.reason(location).await)
                        }
                    },
                }
            }
        };
        if found.is_none() {
            anyhow::bail!("claim {} was deleted", self.name());
        }
        Ok(())
    }

    /// Returns why it is not allocated.
    async fn reason(&self, location: &Location) -> String {
        match claim::waiting(location, &self.name()).await {
            Ok(Some(waiting)) => waiting.reason,
            Ok(None) => "it is not decided yet".to_owned(),
            Err(error) => format!("{error:#}"),
        }
    }
}

/// Returns whether the daemon is not there to answer.
pub(super) fn is_away(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(CommandError::Unreachable { .. }))
        || error.downcast_ref().is_some_and(is_connection_error)
}
