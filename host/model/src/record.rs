//! What the checkpoint keeps of claims and pods. The meaning of each state is in `ARCHITECTURE.md`.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    Allocation, DriverClaim, DriverName, KubeletHold, LiveClaim, ObjectRef, PodContainer, PreparedClaim,
    Problem, PutBack, Uid, limit,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClaimState {
    /// The intent is durable; drivers may or may not have done it.
    Preparing,
    /// Every driver's result is durable.
    Prepared,
    /// Nobody holds it any more; drivers may or may not have given it up.
    Unpreparing,
}

impl ClaimState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Prepared => "prepared",
            Self::Unpreparing => "unpreparing",
        }
    }
}

/// A claim that this node knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClaimRecord {
    pub id: ObjectRef,
    pub state: ClaimState,
    /// Boot in which it was prepared last.
    pub boot_id: String,
    /// Pods that hold it, by UID.
    pub pods: BTreeMap<Uid, ObjectRef>,
    pub allocation: Allocation,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Of those that were asked for: all of the allocation's for a pod, one by one for a kubelet.
    pub drivers: BTreeMap<DriverName, DriverPart>,
    /// What a kubelet said that holds parts of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kubelet: Option<KubeletHold>,
    /// What it keeps from others while it stands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<Hold>,
    /// Who began to release it by hand: finished after a start, if it was interrupted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub releasing: Option<Caller>,
    /// The newest last, at most `limit::TIMELINE_MAX`.
    #[serde(default)]
    pub timeline: VecDeque<Transition>,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

impl ClaimRecord {
    /// One driver's part of this claim.
    pub fn driver_claim(&self, driver: &DriverName) -> DriverClaim {
        DriverClaim {
            id: self.id.clone(),
            devices: self.allocation.devices.iter().filter(|d| d.driver == *driver).cloned().collect(),
            configs: self.allocation.configs.iter().filter(|c| c.driver == *driver).cloned().collect(),
            annotations: self.annotations.clone(),
        }
    }

    /// Parts that nobody holds any more and that their drivers have not given up.
    pub fn leaving(&self) -> impl Iterator<Item = (&DriverName, &DriverPart)> {
        let all = self.state == ClaimState::Unpreparing;
        self.drivers.iter().filter(move |(_, part)| all || part.leaving)
    }

    /// Whether anything of it is being given up.
    pub fn is_leaving(&self) -> bool {
        self.state == ClaimState::Unpreparing || self.drivers.values().any(|part| part.leaving)
    }

    /// Whether one driver's part is being given up.
    pub fn is_part_leaving(&self, driver: &DriverName) -> bool {
        self.leaving().any(|(leaving, _)| leaving == driver)
    }

    /// Drivers of the parts that a kubelet holds.
    pub fn kubelet_drivers(&self) -> impl Iterator<Item = &DriverName> {
        self.drivers.iter().filter(|(_, part)| part.kubelet).map(|(driver, _)| driver)
    }

    pub fn is_held_by_kubelet(&self) -> bool {
        self.kubelet_drivers().next().is_some()
    }

    /// A driver's devices of the claim, as `pool/device`.
    pub fn device_names(&self, driver: &DriverName) -> impl Iterator<Item = String> {
        let devices = self.allocation.devices.iter().filter(move |device| device.driver == *driver);
        devices.map(|device| format!("{}/{}", device.pool, device.device))
    }

    /// What a driver is told of the claim when it gives it up, and what its ledger shows.
    pub fn live_claim(&self, driver: &DriverName) -> Option<LiveClaim> {
        let part = self.drivers.get(driver)?;
        Some(LiveClaim {
            claim: self.driver_claim(driver),
            memo: part.prepared.as_ref().map(|p| p.memo.clone()).unwrap_or_default(),
            driver_version: part.by.as_ref().map(|by| by.version.clone()).unwrap_or_default(),
            boot_id: if part.stale { part.prepared_in.clone() } else { self.boot_id.clone() },
        })
    }

    /// Appends to the timeline and drops what is beyond its bound.
    pub fn note(&mut self, transition: Transition) {
        while self.timeline.len() >= limit::TIMELINE_MAX {
            self.timeline.pop_front();
        }
        self.timeline.push_back(transition);
    }

    /// The same for an entry about a driver, named as its cause, that may be told again and again: one that says what the last
    /// about this driver says is counted there, so that repetitions do not push out the rest of the history.
    pub fn note_repeated(&mut self, transition: Transition) {
        let mut of_driver = self.timeline.iter_mut().rev().filter(|entry| entry.cause == transition.cause);
        match of_driver.next().filter(|last| last.says_the_same(&transition)) {
            Some(last) => last.repeat(transition),
            None => self.note(transition),
        }
    }
}

/// A device, or a piece of hardware behind it, that a claim keeps from others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// `driver/pool/device`, or one of the device's identity strings.
    pub key: String,
    /// Others may hold it as well, if they share it too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shared: bool,
    /// The driver for whose device an identity string is held. None: the key names it, or an older release wrote the record.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<DriverName>,
}

impl Hold {
    /// Whose device it is for, as far as that is known.
    pub fn is_of(&self, driver: &DriverName) -> bool {
        let named = || self.key.strip_prefix(driver.as_str()).is_some_and(|rest| rest.starts_with('/'));
        self.driver.as_ref().map_or_else(named, |of| of == driver)
    }
}

/// What one driver has of a claim.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DriverPart {
    /// None: asked, without a result yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepared: Option<PreparedClaim>,
    /// Prepared, or asked for in vain, in an earlier boot: to be asked again, and its memo good for an unprepare only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stale: bool,
    /// That earlier boot.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prepared_in: String,
    /// Who prepared it; without a result, who was asked last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<PreparedBy>,
    /// A kubelet holds it, whoever else does.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub kubelet: bool,
    /// Nobody holds it while others of the claim are held: its driver may or may not have given it up. In a claim that nobody holds
    /// every part leaves, whatever this says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// The last refusal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

impl DriverPart {
    /// What the driver made of the claim in this boot, and nobody has asked it to undo.
    pub fn current(&self) -> Option<&PreparedClaim> {
        self.prepared.as_ref().filter(|_| !self.stale && !self.leaving)
    }
}

/// The driver that prepared a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedBy {
    pub kind: DriverKind,
    pub version: String,
    /// Of a WASM driver's file; empty for a native plugin.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub digest: String,
}

/// How a driver came to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverKind {
    Wasm,
    Grpc,
}

impl DriverKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wasm => "wasm",
            Self::Grpc => "grpc",
        }
    }
}

/// An entry of a claim's or a driver's history.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// What it came to, such as `prepared`.
    pub what: String,
    /// By which call or event.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cause: String,
    #[serde(default)]
    pub duration_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// That it happened again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub again: Option<Again>,
}

/// An entry that stands for several of the same; its problem and its duration are the last one's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Again {
    /// How often it happened in all.
    pub count: u32,
    /// The last time; milliseconds since the Unix epoch.
    pub last_at_ms: u64,
}

impl Transition {
    /// The same words about the same, with the same problem as far as its code tells.
    fn says_the_same(&self, other: &Self) -> bool {
        let words = (&self.what, &self.cause) == (&other.what, &other.cause);
        words && self.problem_code() == other.problem_code()
    }

    fn problem_code(&self) -> Option<&str> {
        self.problem.as_ref().map(|problem| problem.code.as_str())
    }

    fn repeat(&mut self, last: Self) {
        let count = self.again.map_or(1, |again| again.count).saturating_add(1);
        self.again = Some(Again { count, last_at_ms: last.at_ms });
        (self.duration_us, self.problem) = (last.duration_us, last.problem);
    }
}

/// A pod that was given an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PodRecord {
    pub pod: ObjectRef,
    /// The pod's own name for each claim, and the claim.
    pub claims: BTreeMap<String, ObjectRef>,
    pub containers: Vec<PodContainer>,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// A claim that somebody gave up although not every driver had: who, when, and which drivers do not know.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReleaseRecord {
    pub id: ObjectRef,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    pub by: Caller,
    /// Pods that still stood in the claim's record.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pods: BTreeMap<Uid, ObjectRef>,
    /// Drivers that were not told, or did not agree.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub untold: BTreeMap<DriverName, Untold>,
    /// What became of the values below `/sys` that those drivers had changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub put_back: Vec<PutBack>,
    /// The claim's history to its end.
    #[serde(default)]
    pub timeline: VecDeque<Transition>,
    /// Fields of a newer version; kept as they are.
    #[serde(flatten)]
    pub unknown: BTreeMap<String, serde_json::Value>,
}

/// What a driver was left with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Untold {
    /// As `pool/device`.
    pub devices: Vec<String>,
    /// Why it was not told.
    pub problem: Problem,
}

/// A process that called, by the credentials of its socket.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Name of that user, where the node knows one.
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
            _ => write!(f, "somebody unknown")?,
        }
        self.pid.map_or(Ok(()), |pid| write!(f, ", pid {pid}"))
    }
}
