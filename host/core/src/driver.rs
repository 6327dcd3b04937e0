//! The waist: what a driver is to the rest of the host, whatever way it came.
//!
//! Owns the two traits and the values of a call. Is given requests by the managers; gives back one outcome for each claim
//! asked for, neither more nor fewer. Never touches the checkpoint, CDI or the registry.

pub mod containment;
pub mod moved;
pub mod quarantine;
pub mod stats;
pub mod values;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use nodedock_model::{
    ContainerAllocation, DriverClaim, DriverKind, DriverName, HealthReport, Inventory, LiveClaim,
    PluginDevice, PreparedClaim, Problem, Uid,
};

/// Who a driver is: constant over its life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverIdentity {
    pub name: DriverName,
    pub kind: DriverKind,
    pub version: String,
    /// `sha256:` and hex of a WASM driver's file; empty for a native plugin.
    pub digest: String,
    /// The file's name, or the socket's path.
    pub source: String,
    pub summary: String,
}

/// A driver: an identity and what it does of claims. A device plugin has no driver's name, but that of its resource: it is known by
/// its `DeviceDriver` alone.
#[derive(Clone)]
pub struct Driver {
    pub identity: Arc<DriverIdentity>,
    pub claims: Option<Arc<dyn ClaimDriver>>,
    /// What it has on this node, where it tells: a native DRA plugin publishes by itself.
    pub inventory: Option<watch::Receiver<Arc<Published>>>,
}

/// What a driver last said of its devices.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Published {
    pub inventory: Inventory,
    pub health: HealthReport,
}

nodedock_base::worded! {
    /// What a driver is called for.
    Operation {
        Describe = "describe",
        Discover = "discover",
        Health = "health",
        Validate = "validate",
        Prepare = "prepare",
        Unprepare = "unprepare",
    }
}

impl Operation {
    /// Whether it may change the node; the others look.
    pub fn acts(self) -> bool {
        matches!(self, Self::Prepare | Self::Unprepare)
    }
}

/// How the connection to a native plugin is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Link {
    /// Not made yet.
    #[default]
    Connecting,
    Connected,
    /// It was there, or could not be made; the reason.
    Lost(String),
    /// Given up by us.
    Closed,
}

impl Link {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Connecting => "connecting",
            Self::Connected => "connected",
            Self::Lost(_) => "lost",
            Self::Closed => "closed",
        }
    }
}

/// What every call carries.
#[derive(Debug, Clone)]
pub struct Call {
    /// Runs through all logs of the operation, here and in the driver.
    pub request_id: Arc<str>,
    pub deadline: Duration,
}

/// Facts about the node that every request to a driver repeats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: String,
    pub boot_id: String,
}

/// An outcome for each claim asked for.
pub type Outcomes<T> = BTreeMap<Uid, Result<T, Problem>>;

/// What the calls of a driver came to, as its face measures them.
#[derive(Debug, Clone, PartialEq)]
pub enum DriverStats {
    /// Since it was loaded.
    Wasm(Box<stats::Stats>),
    /// Since it registered.
    Grpc(Vec<stats::RpcSeconds>),
}

/// Claims made ready and given back, in batches.
#[async_trait]
pub trait ClaimDriver: Send + Sync {
    /// None: it does not measure.
    fn stats(&self) -> Option<DriverStats> {
        None
    }

    /// Makes claims ready. May be repeated for a claim at any time and comes to the same end.
    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim>;

    /// Gives claims back. A claim that the driver does not know is success.
    async fn unprepare(&self, call: &Call, claims: &[LiveClaim]) -> Outcomes<()>;
}

/// The code of WASM drivers that served before, for the claims that it prepared.
#[async_trait]
pub trait Predecessors: Send + Sync {
    /// The driver of a name as the file of a digest has it, within what its name is granted now. Loading it may take as long as a
    /// compiler takes, and goes on when this is dropped.
    async fn driver(&self, name: &DriverName, digest: &str) -> Result<Arc<dyn ClaimDriver>, Problem>;

    /// Notes an identity under which the file of its digest serves from now on: as long as somebody holds it, the file is kept.
    fn serves_as(&self, identity: &Arc<DriverIdentity>);

    /// Digests that are kept although nobody serves or works with them.
    fn idle(&self) -> Vec<String>;

    /// Forgets a digest, unless somebody serves with it again.
    fn forget(&self, digest: &str);
}

/// What a device plugin wants of its callers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// `pre_start` is to be called before each start of a container.
    pub pre_start_required: bool,
    /// `preferred_allocation` may be called.
    pub preferred_allocation_available: bool,
}

/// The newest list of a device plugin. None: it has not listed yet. The channel ends with the plugin's stream.
pub type DeviceLists = watch::Receiver<Option<Arc<[PluginDevice]>>>;

/// An extended resource, as the kubelet's device plugin API has it. Every call ends within its deadline.
#[async_trait]
pub trait DeviceDriver: Send + Sync {
    fn options(&self) -> DeviceOptions;

    /// Follows the plugin's lists; each replaces the one before, also one that nobody has looked at yet.
    async fn list_and_watch(&self, call: &Call) -> Result<DeviceLists, Problem>;

    /// Makes the devices ready for one container.
    async fn allocate(&self, call: &Call, device_ids: &[String]) -> Result<ContainerAllocation, Problem>;

    /// Which of `available` are best for `size` devices that contain `must_include`. What it answers is advice: the caller keeps
    /// what is available.
    async fn preferred_allocation(
        &self,
        call: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem>;

    /// Called before each start of a container, if the plugin asked for that.
    async fn pre_start(&self, call: &Call, device_ids: &[String]) -> Result<(), Problem>;
}

/// A driver's view of its own live claims, from the checkpoint.
pub trait Ledger: Send + Sync {
    fn claims(&self, driver: &DriverName) -> Vec<LiveClaim>;
    fn claim(&self, driver: &DriverName, uid: &str) -> Option<LiveClaim>;
    /// Those that hold this device, by UID.
    fn holders(&self, driver: &DriverName, pool: &str, device: &str) -> Vec<LiveClaim>;
}

/// Of a driver that is only looked at, or measured: it holds nothing.
#[derive(Debug, Clone, Copy)]
pub struct NoClaims;

impl Ledger for NoClaims {
    fn claims(&self, _: &DriverName) -> Vec<LiveClaim> {
        Vec::new()
    }

    fn claim(&self, _: &DriverName, _: &str) -> Option<LiveClaim> {
        None
    }

    fn holders(&self, _: &DriverName, _: &str, _: &str) -> Vec<LiveClaim> {
        Vec::new()
    }
}

/// Completes what a driver answered to one outcome per asked claim: a missing claim is a defect of the driver, and what it
/// said of claims that nobody asked for is named and dropped.
pub fn settle<'a, T>(
    asked: impl IntoIterator<Item = &'a Uid>,
    answered: impl IntoIterator<Item = (String, Result<T, Problem>)>,
) -> (Outcomes<T>, Vec<String>) {
    let mut open: BTreeMap<&str, &Uid> = asked.into_iter().map(|uid| (uid.as_str(), uid)).collect();
    let mut outcomes = Outcomes::new();
    let mut strangers = Vec::new();
    for (uid, outcome) in answered {
        if let Some(uid) = open.remove(uid.as_str()) {
            outcomes.insert(uid.clone(), outcome);
        } else if let Some(entry) = outcomes.get_mut(uid.as_str()) {
            *entry = Err(twice(&uid));
        } else {
            strangers.push(uid);
        }
    }
    for uid in open.into_values() {
        outcomes.insert(uid.clone(), Err(skipped(uid)));
    }
    (outcomes, strangers)
}

/// The same problem for every claim of a call that failed as a whole.
pub fn all_failed<'a, T>(asked: impl IntoIterator<Item = &'a Uid>, problem: &Problem) -> Outcomes<T> {
    asked.into_iter().map(|uid| (uid.clone(), Err(problem.clone()))).collect()
}

fn twice(uid: &str) -> Problem {
    Problem::internal("claim-answered-twice", format!("the driver answered twice for claim {uid}"))
}

fn skipped(uid: &Uid) -> Problem {
    Problem::internal("claim-skipped", format!("the driver gave no outcome for claim {uid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> Uid {
        Uid::new(text).unwrap()
    }

    #[test]
    fn every_asked_claim_gets_exactly_one_outcome() {
        let asked = [uid("a"), uid("b"), uid("c")];
        let answered = [
            ("a".to_owned(), Ok(1)),
            ("c".to_owned(), Ok(3)),
            ("c".to_owned(), Ok(4)),
            ("z".to_owned(), Ok(9)),
        ];
        let (outcomes, strangers) = settle(&asked, answered);
        assert_eq!(outcomes.len(), 3);
        assert_eq!(outcomes["a"], Ok(1));
        assert_eq!(outcomes["b"].as_ref().unwrap_err().code, "claim-skipped");
        assert_eq!(outcomes["c"].as_ref().unwrap_err().code, "claim-answered-twice");
        assert_eq!(strangers, ["z"]);
    }
}
