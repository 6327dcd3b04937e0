//! Records of claims and pods in the checkpoint. The module of the claim manager describes the states.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use strum::IntoStaticStr;

use super::{
    Allocation, Consumer, DriverClaim, DriverClaimRecord, DriverName, ExtendedResource,
    KubeletHold, ObjectName, ObjectRef, PodContainer, PreparedClaim, Problem, PutBack,
    ResourceDevices, SmallMap, Uid, exact, limit, plugin_driver,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum ClaimState {
    /// The intent is durable; drivers may or may not have acted.
    Preparing,
    /// Every driver's result is durable.
    Prepared,
    /// The claim has no users any more; drivers may or may not have unprepared it.
    Unpreparing,
}

impl ClaimState {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A claim on this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimRecord {
    pub id: ObjectRef,
    pub state: ClaimState,
    /// Boot of its last prepare.
    pub boot_id: String,
    /// Pods that use it, by UID.
    pub pods: SmallMap<Uid, ObjectRef>,
    pub allocation: Allocation,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Parts of the requested drivers: all drivers of the allocation for a pod, one by one for a kubelet. Boxed, because a map takes memory
    /// for eleven values at once.
    pub drivers: BTreeMap<DriverName, Box<DriverPart>>,
    /// State of a kubelet that uses parts of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletHold>,
    /// Devices that it reserves.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub holds: Vec<Hold>,
    /// The host made it for an extended resource that a container wants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource: Option<ResourceDevices>,
    /// Caller of a release in progress, which the next start completes if it was interrupted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub releasing: Option<Caller>,
    /// The newest last, at most `limit::TIMELINE_MAX`.
    #[serde(deserialize_with = "exact::queue")]
    pub timeline: VecDeque<Transition>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl ClaimRecord {
    /// Returns the record of a claim without users, devices and drivers.
    pub fn new(id: ObjectRef, state: ClaimState, boot_id: &str) -> Self {
        Self {
            id,
            state,
            boot_id: boot_id.to_owned(),
            pods: SmallMap::new(),
            allocation: Allocation::default(),
            annotations: BTreeMap::new(),
            drivers: BTreeMap::new(),
            kubelet: None,
            holds: Vec::new(),
            resource: None,
            releasing: None,
            timeline: VecDeque::new(),
            unknown: BTreeMap::new(),
        }
    }

    /// Returns a driver's part of the claim, without consumers and progress, which change while the request stays the same.
    pub fn driver_claim(&self, driver: &DriverName) -> DriverClaim {
        DriverClaim {
            id: self.id.clone(),
            devices: self.allocation.of_driver(driver).cloned().collect(),
            configs: self
                .allocation
                .configs
                .iter()
                .filter(|c| c.driver == *driver)
                .cloned()
                .collect(),
            annotations: self.annotations.clone(),
            reserved_for: Vec::new(),
            progress: Vec::new(),
        }
    }

    /// Returns whether the claim has devices of a device plugin without an adapter.
    pub fn is_of_plugin(&self) -> bool {
        self.resource
            .as_ref()
            .is_some_and(|of| self.allocation.has_driver(&plugin_driver(&of.resource)))
    }

    /// The resource and the pod for which the host made the claim.
    pub fn made_for(&self) -> Option<(&ExtendedResource, &Uid)> {
        Some((&self.resource.as_ref()?.resource, self.pods.keys().next()?))
    }

    /// Returns the parts without users that their drivers have not unprepared.
    pub fn leaving(&self) -> impl Iterator<Item = (&DriverName, &DriverPart)> {
        let all = self.state == ClaimState::Unpreparing;
        let leaving = self
            .drivers
            .iter()
            .filter(move |(_, part)| all || part.leaving);
        leaving.map(|(driver, part)| (driver, &**part))
    }

    /// Returns whether any part is being unprepared.
    pub fn is_leaving(&self) -> bool {
        self.state == ClaimState::Unpreparing || self.drivers.values().any(|part| part.leaving)
    }

    /// Returns whether one driver's part is being unprepared.
    pub fn is_part_leaving(&self, driver: &DriverName) -> bool {
        self.leaving().any(|(leaving, _)| leaving == driver)
    }

    /// Returns the drivers of the parts that a kubelet uses.
    pub fn kubelet_drivers(&self) -> impl Iterator<Item = &DriverName> {
        self.drivers
            .iter()
            .filter(|(_, part)| part.kubelet)
            .map(|(driver, _)| driver)
    }

    pub fn is_held_by_kubelet(&self) -> bool {
        self.kubelet_drivers().next().is_some()
    }

    /// Returns whether a kubelet uses parts of it, and it is a claim of the API server.
    pub fn is_held_by_api_kubelet(&self) -> bool {
        self.is_held_by_kubelet() && self.kubelet.as_ref().is_some_and(|hold| !hold.given)
    }

    /// Returns whether it was prepared for a scheduler, and no kubelet has requested it yet.
    pub fn is_held_early(&self) -> bool {
        self.kubelet.as_ref().is_some_and(|hold| hold.early)
    }

    /// Returns a driver's devices of the claim, as `pool/device`.
    pub fn device_names(&self, driver: &DriverName) -> impl Iterator<Item = String> {
        self.allocation
            .of_driver(driver)
            .map(|device| format!("{}/{}", device.pool, device.device))
    }

    /// Returns the consumers that the host knows: those of the kubelet's last request, and pods of other callers.
    pub fn consumers(&self) -> Vec<Consumer> {
        let of_kubelet = self
            .kubelet
            .iter()
            .flat_map(|hold| hold.consumers.iter().cloned());
        let pods = self.pods.values().map(Consumer::of_pod);
        of_kubelet
            .chain(pods)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }

    /// Returns the claim as an unprepare and the prepared claims of a driver contain it, without its progress.
    pub fn driver_record(&self, driver: &DriverName) -> Option<DriverClaimRecord> {
        let part = self.drivers.get(driver)?;
        Some(DriverClaimRecord {
            claim: DriverClaim {
                reserved_for: self.consumers(),
                ..self.driver_claim(driver)
            },
            prepared: part.prepared.is_some(),
            memo: part
                .prepared
                .as_ref()
                .map(|p| p.memo.clone())
                .unwrap_or_default(),
            driver_version: part
                .by
                .as_ref()
                .map(|by| by.version.clone())
                .unwrap_or_default(),
            boot_id: if part.stale {
                part.prepared_in.clone()
            } else {
                self.boot_id.clone()
            },
        })
    }

    /// Appends to the timeline and drops entries beyond its bound.
    pub fn note(&mut self, transition: Transition) {
        while self.timeline.len() >= limit::TIMELINE_MAX {
            self.timeline.pop_front();
        }
        // Most claims get no further entry.
        self.timeline.reserve_exact(1);
        self.timeline.push_back(transition);
    }

    /// Appends an entry about a driver, its cause, that may be repeated often: an entry equal to the last one about this driver increments
    /// its count, so that repetitions do not displace the rest of the history.
    pub fn note_repeated(&mut self, transition: Transition) {
        let mut of_driver = self
            .timeline
            .iter_mut()
            .rev()
            .filter(|entry| entry.cause == transition.cause);
        match of_driver
            .next()
            .filter(|last| last.says_the_same(&transition))
        {
            Some(last) => last.repeat(transition),
            None => self.note(transition),
        }
    }
}

/// A device, or hardware behind it, that a claim reserves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// `driver/pool/device`, one of the device's identity strings, a directory below `/sys/devices`, or `node:KIND:MAJOR:MINOR`.
    pub key: String,
    /// Other claims may use it as well, if they share it too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// The driver whose device has the identity string. `None`: the key names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverName>,
    /// The host derived it from what the container gets: it excludes devices of other drivers only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub derived: bool,
    /// Use of counters and capacities that other devices or claims use as well.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "exact::list"
    )]
    pub uses: Vec<Use>,
}

/// A part of a counter of a pool, or of the capacity of a shared device; or the compatibility groups at a counter set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    /// `driver/pool#set/counter`, which a device uses once, in however many claims it is; `driver/pool/device@capacity`, of which each
    /// share uses its own; `driver/pool#set` with groups.
    pub of: String,
    /// Quantity; empty with groups.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub amount: String,
    /// The quantity of all together; empty with groups.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub whole: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
}

impl Hold {
    /// Returns the driver of the device, if it is known.
    pub fn is_of(&self, driver: &DriverName) -> bool {
        self.driver.as_ref().map_or_else(
            || {
                self.key
                    .strip_prefix(driver.as_str())
                    .is_some_and(|rest| rest.starts_with('/'))
            },
            |of| of == driver,
        )
    }
}

/// One driver's part of a claim.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DriverPart {
    /// `None`: called, without a result yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<Arc<PreparedClaim>>,
    /// Prepared, or failed, in an earlier boot: the driver must be called again, and the memo is valid for an unprepare only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stale: bool,
    /// The earlier boot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prepared_in: String,
    /// The driver version that prepared it; without a result, the version that was called last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<PreparedBy>,
    /// A kubelet uses it, possibly in addition to pods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kubelet: bool,
    /// The part has no users while other parts of the claim have: its driver may or may not have unprepared it. In a claim without users
    /// every part is leaving, regardless of this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// The last refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

impl DriverPart {
    /// Returns the driver's result of this boot, unless an unprepare was requested.
    pub fn current(&self) -> Option<&PreparedClaim> {
        self.prepared
            .as_deref()
            .filter(|_| !self.stale && !self.leaving)
    }
}

/// The driver version that prepared a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedBy {
    pub kind: DriverKind,
    pub version: String,
    /// Digest of a WASM driver's file; empty for a native plugin.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
    /// A native plugin whose pools the host publishes, since it lists its devices here.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lists: bool,
}

/// Kind of a driver.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize, IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum DriverKind {
    #[default]
    Wasm,
    Grpc,
    /// A device plugin that an adapter makes a driver.
    Adapter,
    /// The host's own driver of devices in CDI specs.
    Cdi,
}

impl DriverKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An entry of a claim's or a driver's history.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Outcome, such as `prepared`.
    pub what: String,
    /// Call or event that caused it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cause: String,
    #[serde(default)]
    pub duration_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// Set for a repeated entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Again>,
}

/// Repetitions of an entry; problem and duration of the entry are those of the last one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    /// Number of occurrences.
    pub count: u32,
    /// Time of the last one; milliseconds since the Unix epoch.
    pub last_at_ms: u64,
}

impl Transition {
    /// Returns whether the entries are equal, with the same problem code.
    fn says_the_same(&self, other: &Self) -> bool {
        let words = (&self.what, &self.cause) == (&other.what, &other.cause);
        words && self.problem_code() == other.problem_code()
    }

    fn problem_code(&self) -> Option<&str> {
        self.problem.as_ref().map(|problem| problem.code.as_str())
    }

    fn repeat(&mut self, last: Self) {
        let count = self.again.map_or(1, |again| again.count).saturating_add(1);
        self.again = Some(Again {
            count,
            last_at_ms: last.at_ms,
        });
        (self.duration_us, self.problem) = (last.duration_us, last.problem);
    }
}

/// A pod with a completed request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    pub pod: ObjectRef,
    /// The pod's own name for each claim, and the claim.
    pub claims: SmallMap<String, ObjectRef>,
    #[serde(deserialize_with = "exact::list")]
    pub containers: Vec<PodContainer>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// The name of the node that this machine is, which its claims and slices have.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeRecord {
    /// [`Self::KEY`].
    pub uid: Uid,
    pub name: ObjectName,
    /// Time since which the node has had this name, in milliseconds since the Unix epoch.
    pub since_ms: u64,
    /// Names that it had before, and of which a cluster may still have objects; the newest last, at most [`Self::FORMER_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<FormerName>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// A name that a node had.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormerName {
    pub name: ObjectName,
    /// Time of the rename, in milliseconds since the Unix epoch.
    pub until_ms: u64,
}

impl NodeRecord {
    /// Former names in a record.
    pub const FORMER_MAX: usize = 8;

    /// Key of the one record.
    pub const KEY: &str = "node";

    pub fn new(name: ObjectName, since_ms: u64) -> Self {
        Self {
            uid: Uid::new(Self::KEY).expect("it has letters only"),
            name,
            since_ms,
            former: Vec::new(),
            unknown: BTreeMap::new(),
        }
    }

    /// Returns the record of the node after it got another name.
    #[must_use]
    pub fn renamed(self, name: ObjectName, now_ms: u64) -> Self {
        let mut former = self.former;
        former.push(FormerName {
            name: self.name,
            until_ms: now_ms,
        });
        former.retain(|former| former.name != name);
        former.drain(..former.len().saturating_sub(Self::FORMER_MAX));
        Self {
            former,
            unknown: self.unknown,
            ..Self::new(name, now_ms)
        }
    }
}

/// A claim that an operator released: the caller, the time, and the drivers that did not unprepare it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReleaseRecord {
    pub id: ObjectRef,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub by: Caller,
    /// Pods in the claim's record.
    #[serde(default, skip_serializing_if = "SmallMap::is_empty")]
    pub pods: SmallMap<Uid, ObjectRef>,
    /// Drivers that did not unprepare the claim.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub untold: BTreeMap<DriverName, Untold>,
    /// Outcome for the values below `/sys` that those drivers had changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<PutBack>,
    /// The claim's history to its end.
    pub timeline: VecDeque<Transition>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// A claim that was prepared and unprepared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndedRecord {
    pub id: ObjectRef,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Pods that used it last.
    #[serde(default, skip_serializing_if = "SmallMap::is_empty")]
    pub pods: SmallMap<Uid, ObjectRef>,
    /// Its devices as `pool/device`, by driver.
    pub devices: BTreeMap<DriverName, Vec<String>>,
    /// The claim's history to its end.
    pub timeline: VecDeque<Transition>,
    /// Fields of a newer version, preserved unchanged.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// Devices of a driver that did not unprepare a claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Untold {
    /// Devices as `pool/device`.
    pub devices: Vec<String>,
    /// Why the driver did not unprepare the claim.
    pub problem: Problem,
}

/// A calling process, by the credentials of its socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Name of that user, if the node has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.user, self.uid) {
            (Some(user), Some(uid)) => write!(f, "{user} (uid {uid})")?,
            (_, Some(uid)) => write!(f, "uid {uid}")?,
            _ => write!(f, "an unknown caller")?,
        }
        self.pid.map_or(Ok(()), |pid| write!(f, ", pid {pid}"))
    }
}
