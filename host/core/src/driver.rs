//! The driver traits: the interface of drivers to the rest of the host, for every kind of driver.
//!
//! Owns the two traits and the values of a call. Given requests by the managers, a driver returns exactly one outcome for each
//! claim. Never uses the checkpoint, CDI or the registry.

pub mod containment;
pub mod moved;
pub mod plugin_calls;
pub(crate) mod plugin_paths;
pub mod quarantine;
pub mod stats;
pub mod values;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use strum::IntoStaticStr;
use tokio::sync::watch;

use nodedock_base::printable::shorten;
pub use nodedock_model::DeviceOptions;
use nodedock_model::{
    ConfigSource, ContainerAllocation, DriverClaim, DriverClaimRecord, DriverKind, DriverName,
    ExtendedResource, HealthReport, Inventory, LeftOut, OpaqueConfig, PluginDevice, PreparedClaim,
    Problem, ProblemCode, ReadingsReport, Uid, limit,
};

/// Identity of a driver, constant over its life.
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

impl DriverIdentity {
    /// Returns the identity of a device plugin as a driver. `source`: its name in the registry.
    pub fn of_device_plugin(name: DriverName, resource: &ExtendedResource, source: String) -> Self {
        let summary = format!("the device plugin of {resource}");
        let (version, digest) = Default::default();
        Self {
            name,
            kind: DriverKind::Adapter,
            version,
            digest,
            source,
            summary,
        }
    }
}

/// A driver: an identity and its `ClaimDriver`. A device plugin has no driver name, only that of its resource: it has only a
/// `DeviceDriver`.
#[derive(Clone)]
pub struct Driver {
    pub identity: Arc<DriverIdentity>,
    pub claims: Option<Arc<dyn ClaimDriver>>,
    /// Its inventory on this node, if it reports one: a native DRA plugin publishes its own.
    pub inventory: Option<watch::Receiver<Arc<Published>>>,
}

/// Last inventory and health of a driver, and what it measured with them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Published {
    pub inventory: Inventory,
    /// Devices that the driver sees and does not offer.
    pub left_out: LeftOut,
    pub health: HealthReport,
    pub telemetry: Telemetry,
}

impl Published {
    /// Returns whether another driver or the API server has to know of the difference. Readings and devices that are left out are only read.
    pub fn differs(&self, other: &Self) -> bool {
        self.inventory != other.inventory || self.health != other.health
    }
}

/// Readings of devices; none with the problem why there are none.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Telemetry {
    pub readings: ReadingsReport,
    pub problem: Option<Problem>,
}

nodedock_base::worded! {
    /// Operation of a driver call.
    Operation {
        Describe = "describe",
        Discover = "discover",
        Health = "health",
        Telemetry = "telemetry",
        Validate = "validate",
        Prepare = "prepare",
        Unprepare = "unprepare",
    }
}

impl Operation {
    /// Returns whether it may change the node; the others only read.
    pub fn acts(self) -> bool {
        matches!(self, Self::Prepare | Self::Unprepare)
    }
}

/// State of the connection to a native plugin.
#[derive(Debug, Clone, Default, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Link {
    /// Not connected yet.
    #[default]
    Connecting,
    Connected,
    /// Lost or failed, with the reason.
    Lost(String),
    /// Closed by this side.
    Closed,
}

impl Link {
    pub fn as_str(&self) -> &'static str {
        self.into()
    }
}

/// Data that every call carries.
#[derive(Debug, Clone)]
pub struct Call {
    /// Identifies the operation in all log lines, of the host and of the driver.
    pub request_id: Arc<str>,
    pub deadline: Duration,
}

/// Facts about the node that every call contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeFacts {
    pub name: String,
    pub boot_id: String,
}

/// An outcome for each claim of a call.
pub type Outcomes<T> = BTreeMap<Uid, Result<T, Problem>>;

/// Metrics of a driver's calls.
#[derive(Debug)]
pub enum DriverStats {
    Wasm(Arc<stats::Stats>),
    Grpc(stats::RpcSeconds),
}

/// Prepares and unprepares claims, in batches.
#[async_trait]
pub trait ClaimDriver: Send + Sync {
    /// Returns metrics; `None` if the driver has none.
    fn stats(&self) -> Option<DriverStats> {
        None
    }

    /// Returns whether a prepare cannot change the node, regardless of the driver's behavior. After a crash during the prepare nothing has
    /// to be undone, so it needs no intent in the checkpoint.
    fn is_pure(&self) -> bool {
        false
    }

    /// Checks opaque parameters, each entry (JSON) by itself. Returns the verdicts in their order. A driver without such a check accepts all.
    async fn validate_parameters(
        &self,
        call: &Call,
        parameters: &[&str],
    ) -> Vec<Result<(), Problem>> {
        let _ = call;
        vec![Ok(()); parameters.len()]
    }

    /// Prepares claims whose parameters were validated. May be repeated for a claim at any time with the same result.
    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim>;

    /// Unprepares claims. An unknown claim is a success.
    async fn unprepare(&self, call: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()>;
}

/// Has a driver check the parameters of claims; the problem of a claim says of which parameters it is. A claim without parameters is not
/// among the outcomes.
pub async fn validate_claims(
    driver: &dyn ClaimDriver,
    call: &Call,
    claims: &[DriverClaim],
) -> Outcomes<()> {
    let configs = claims.iter().flat_map(|claim| &claim.configs);
    let texts: BTreeSet<_> = configs.map(|config| config.parameters.as_str()).collect();
    let texts: Vec<_> = texts.into_iter().collect();
    if texts.is_empty() {
        return Outcomes::new();
    }
    let verdicts = driver.validate_parameters(call, &texts).await;
    let verdicts: BTreeMap<_, _> = texts.into_iter().zip(verdicts).collect();
    let with_configs = claims.iter().filter(|claim| !claim.configs.is_empty());
    with_configs
        .map(|claim| {
            let refused = claim.configs.iter().find_map(|config| {
                let verdict = verdicts.get(config.parameters.as_str());
                match verdict.unwrap_or(&Err(skipped(&claim.id.uid))) {
                    Ok(()) => None,
                    Err(problem) => Some(of_config(config, problem)),
                }
            });
            (claim.id.uid.clone(), refused.map_or(Ok(()), Err))
        })
        .collect()
}

/// The problem of one entry of parameters, with its source.
fn of_config(config: &OpaqueConfig, problem: &Problem) -> Problem {
    let of = match config.source {
        ConfigSource::DeviceClass => "parameters of the DeviceClass",
        ConfigSource::Claim => "parameters of the claim",
    };
    let requests = match config.requests.as_slice() {
        [] => String::new(),
        requests => format!(" (requests {})", requests.join(", ")),
    };
    let (driver, why) = (&config.driver, &problem.message);
    let message = format!("{of} for driver {driver}{requests}: {why}");
    Problem {
        message: shorten(&message, limit::PROBLEM_MESSAGE_BYTES_MAX),
        ..problem.clone()
    }
}

/// Previous versions of WASM drivers, for the claims that they prepared.
#[async_trait]
pub trait StoredDrivers: Send + Sync {
    /// Returns the driver of a name from the file with a digest, within the current grant of the name. Loading may take as long as a
    /// compilation, and continues when the future is dropped.
    async fn driver(
        &self,
        name: &DriverName,
        digest: &str,
    ) -> Result<Arc<dyn ClaimDriver>, Problem>;

    /// Records an identity whose file serves from now on: the file is stored while a reference to the identity exists.
    fn serves_as(&self, identity: &Arc<DriverIdentity>);

    /// Returns the stored digests that no driver uses.
    fn idle(&self) -> Vec<String>;

    /// Deletes a digest's file, unless a driver uses it again.
    fn forget(&self, digest: &str);
}

/// The newest list of a device plugin. `None`: it has not listed yet. The channel ends with the plugin's stream.
pub type DeviceLists = watch::Receiver<Option<Arc<[PluginDevice]>>>;

/// An extended resource, as in the kubelet's device plugin API. Every call ends within its deadline.
#[async_trait]
pub trait DeviceDriver: Send + Sync {
    fn options(&self) -> DeviceOptions;

    /// Watches the plugin's lists; each replaces the previous one, even if that was not read.
    async fn list_and_watch(&self, call: &Call) -> Result<DeviceLists, Problem>;

    /// Allocates the devices for one container.
    async fn allocate(
        &self,
        call: &Call,
        device_ids: &[String],
    ) -> Result<ContainerAllocation, Problem>;

    /// Returns the plugin's preferred `size` devices of `available`, including `must_include`. The result is advice: the caller ignores
    /// devices that are not available.
    async fn preferred_allocation(
        &self,
        call: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem>;

    /// Must be called before each start of a container, if the plugin requests that.
    async fn pre_start(&self, call: &Call, device_ids: &[String]) -> Result<(), Problem>;
}

/// A driver's view of the claims that it has prepared, or was called to prepare, from the checkpoint; without their progress.
pub trait PreparedClaims: Send + Sync {
    /// Returns at most `limit` claims with UIDs after `after`, sorted by UID; of all claims, or of those that use a device (pool and name).
    fn after(
        &self,
        driver: &DriverName,
        device: Option<(&str, &str)>,
        after: Option<&str>,
        limit: usize,
    ) -> Vec<DriverClaimRecord>;

    fn get(&self, driver: &DriverName, uid: &str) -> Option<DriverClaimRecord>;
}

/// Completes a driver's result to one outcome per claim of the call: a missing claim is a defect of the driver, and outcomes of other
/// claims are logged and dropped.
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

/// Returns the same problem for every claim of a failed call.
pub fn all_failed<'a, T>(
    asked: impl IntoIterator<Item = &'a Uid>,
    problem: &Problem,
) -> Outcomes<T> {
    asked
        .into_iter()
        .map(|uid| (uid.clone(), Err(problem.clone())))
        .collect()
}

fn twice(uid: &str) -> Problem {
    Problem::internal(
        ProblemCode::ClaimAnsweredTwice,
        format!("the driver answered twice for claim {uid}"),
    )
}

/// The problem of a claim for which a driver gave no outcome.
pub fn skipped(uid: &Uid) -> Problem {
    Problem::internal(
        ProblemCode::ClaimSkipped,
        format!("the driver gave no outcome for claim {uid}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> Uid {
        Uid::new(text).unwrap()
    }

    #[test]
    fn every_requested_claim_has_one_outcome() {
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
        assert_eq!(
            outcomes["c"].as_ref().unwrap_err().code,
            "claim-answered-twice"
        );
        assert_eq!(strangers, ["z"]);
    }
}
