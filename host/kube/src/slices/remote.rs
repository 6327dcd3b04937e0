//! Slices at a real API server: of this node, in the version that it serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::mpsc;

use super::planner::{Counters, Draft, Held};
use super::view::SliceEvent;
use super::{SliceApi, SliceError, wire};
use crate::api::{Api, ApiError, Follower, Following, Path, Preconditions, Selection, Target, Version};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::ObjectName;

/// Events that wait for the task that writes; the watch waits with them.
const EVENTS_WAITING_MAX: usize = 64;
/// All slices are listed anew so often, whatever the watch says.
const RESYNC: Duration = Duration::from_secs(600);
/// From this minor version of Kubernetes 1 on counter sets stand in slices of their own.
const COUNTERS_APART_SINCE: u32 = 35;

/// What is told of the slices of this node, as long as it is kept.
pub struct SliceEvents {
    pub(super) events: mpsc::Receiver<SliceEvent>,
    pub(super) following: Option<Following>,
}

/// The slices of a node at its API server.
pub struct RemoteSlices {
    api: Api,
    counters_together: AtomicBool,
}

impl RemoteSlices {
    /// Follows the slices of this node from now on.
    pub fn follow(api: Api, tasks: &Tasks, node: &ObjectName) -> (Arc<Self>, SliceEvents) {
        let (told, events) = mpsc::channel(EVENTS_WAITING_MAX);
        let slices = Arc::new(Self { api: api.clone(), counters_together: AtomicBool::new(false) });
        let target = Target {
            what: "resource slices of this node",
            path: Path::versioned(Version::slices),
            selection: Selection::fields(format!("spec.nodeName={node}")),
            resync: Some(RESYNC),
        };
        let following = api.follow(tasks, target, Arc::new(Teller { slices: slices.clone(), told }));
        (slices, SliceEvents { events, following: Some(following) })
    }

    /// Learns from the server's version what its slices look like. Where it does not say, what is known stands.
    async fn look_at_version(&self) {
        if let Ok(version) = self.api.get("/version").await
            && let Some(is_old) = wants_counters_together(&version)
        {
            self.counters_together.store(is_old, Relaxed);
        }
    }
}

/// None: the version is none.
fn wants_counters_together(version: &Value) -> Option<bool> {
    // Distributions write `34+`.
    let number = |field: &str| version.get(field)?.as_str()?.trim_end_matches('+').parse::<u32>().ok();
    Some(number("major")? == 1 && number("minor")? < COUNTERS_APART_SINCE)
}

#[async_trait]
impl SliceApi for RemoteSlices {
    fn counters(&self) -> Counters {
        if self.counters_together.load(Relaxed) { Counters::Together } else { Counters::Apart }
    }

    async fn get(&self, name: &str) -> Result<Option<Held>, SliceError> {
        let ask = |version: Version| async move { Ok((version, self.api.get(&version.slice(name)).await?)) };
        match self.api.versioned(ask).await {
            Ok((version, object)) => read(version, object).map(Some),
            Err(ApiError::NotFound(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    async fn create(&self, generate_name: &str, draft: &Draft) -> Result<Held, SliceError> {
        let ask = |version: Version| async move {
            let object = wire::created(version, generate_name, draft);
            Ok((version, self.api.create(&version.slices(), &object).await?))
        };
        let (version, object) = self.api.versioned(ask).await?;
        read(version, object)
    }

    async fn update(&self, was: &Held, draft: &Draft) -> Result<Held, SliceError> {
        let ask = |version: Version| async move {
            let object = wire::updated(version, was, draft);
            Ok((version, self.api.update(&version.slice(&was.name), &object).await?))
        };
        let (version, object) = self.api.versioned(ask).await?;
        read(version, object)
    }

    async fn delete(&self, name: &str, uid: &str, resource_version: &str) -> Result<(), SliceError> {
        let preconditions =
            Preconditions { uid: Some(uid.to_owned()), resource_version: Some(resource_version.to_owned()) };
        let preconditions = &preconditions;
        let ask =
            |version: Version| async move { self.api.delete(&version.slice(name), preconditions).await };
        Ok(self.api.versioned(ask).await?)
    }
}

fn read(version: Version, object: Value) -> Result<Held, SliceError> {
    wire::held(version, object).map_err(|error| SliceError::Away {
        words: format!("what the API server answered is not the slice that was asked for: {}", chain(&error)),
        retry_after: None,
    })
}

impl From<ApiError> for SliceError {
    fn from(error: ApiError) -> Self {
        let words = error.to_string();
        match error {
            ApiError::NotFound(_) => Self::NotFound(words),
            ApiError::Conflict(_) | ApiError::AlreadyExists(_) => Self::Conflict(words),
            ApiError::NotServed(_) | ApiError::Forbidden(_) | ApiError::Invalid { .. } => {
                Self::Refused(words)
            }
            error => Self::Away { words, retry_after: error.retry_after() },
        }
    }
}

/// Tells the writer of slices what the watch tells.
struct Teller {
    slices: Arc<RemoteSlices>,
    told: mpsc::Sender<SliceEvent>,
}

impl Teller {
    /// Where nobody listens any more, the tasks stop.
    async fn tell(&self, event: SliceEvent) {
        let _ = self.told.send(event).await;
    }
}

#[async_trait]
impl Follower for Teller {
    async fn listed(&self, objects: Vec<Value>) {
        self.slices.look_at_version().await;
        // Known since the list was asked for by it.
        let version = self.slices.api.version().await.unwrap_or(Version::V1);
        let slices = objects.into_iter().filter_map(|object| readable(version, object));
        self.tell(SliceEvent::Listed(slices.collect())).await;
    }

    async fn applied(&self, object: Value) {
        let version = version_of(&object).unwrap_or(Version::V1);
        if let Some(held) = readable(version, object) {
            self.tell(SliceEvent::Changed(Box::new(held))).await;
        }
    }

    async fn deleted(&self, object: Value) {
        let text = |field: &str| object["metadata"][field].as_str().map(str::to_owned);
        if let (Some(name), Some(uid)) = (text("name"), text("uid")) {
            self.tell(SliceEvent::Deleted { name, uid }).await;
        }
    }
}

fn version_of(object: &Value) -> Option<Version> {
    let said = object.get("apiVersion")?.as_str()?;
    Version::ALL.iter().copied().find(|version| version.api_version() == said)
}

/// What cannot be read is none of ours, and left alone.
fn readable(version: Version, object: Value) -> Option<Held> {
    let held = wire::held(version, object);
    held.inspect_err(|error| tracing::debug!(error = chain(error), "a slice is passed over")).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn servers_say_whether_counters_stand_with_their_devices() {
        let of =
            |major: &str, minor: &str| wants_counters_together(&json!({ "major": major, "minor": minor }));
        assert_eq!(of("1", "34"), Some(true));
        assert_eq!(of("1", "34+"), Some(true));
        assert_eq!(of("1", "35"), Some(false));
        assert_eq!(of("2", "0"), Some(false));
        assert_eq!(of("1", ""), None);
        assert_eq!(wants_counters_together(&json!([])), None);
    }
}
