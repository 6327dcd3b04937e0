//! The plugin's answers.

use std::sync::Arc;

use tokio::sync::Notify;
use tonic::Code;

/// A claim in a call, without its allocation, which a plugin reads from the API server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Prepare,
    Unprepare,
}

/// A device in a response.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Base names of requests; empty means every request of the claim.
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    /// Qualified names, `VENDOR/CLASS=NAME`, of CDI files that the plugin wrote.
    pub cdi_names: Vec<String>,
    /// Not in `v1beta1`.
    pub share_id: Option<String>,
}

/// Outcome for one claim of a call. A real plugin uses `Devices` or `Error`; the rest is for tests.
#[derive(Debug, Clone)]
pub enum ScriptedOutcome {
    /// Success; for an unprepare the devices are not used.
    Devices(Vec<Device>),
    Error(String),
    /// The answer omits the claim.
    Skip,
    /// The answer contains the claim twice.
    Twice(Vec<Device>),
    /// The answer also contains another claim.
    Stranger(String, Vec<Device>),
    /// The answer contains another claim instead.
    Instead(String, Vec<Device>),
    /// An error of so many bytes.
    Huge(usize),
    /// The whole call fails with this status.
    Status(Code, String),
    /// The plugin never answers.
    Hang,
    /// The plugin answers when this is notified.
    After(Arc<Notify>, Box<ScriptedOutcome>),
    /// The plugin crashes in the middle of the call.
    Die,
}

type Decide = dyn Fn(Operation, &Claim) -> ScriptedOutcome + Send + Sync;

/// Decides the outcome for each claim.
#[derive(Clone)]
pub struct Script(Arc<Decide>);

impl Script {
    pub fn new(
        decide: impl Fn(Operation, &Claim) -> ScriptedOutcome + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(decide))
    }

    /// Creates a script with the same outcome for every prepare; every unprepare succeeds.
    pub fn prepare(answer: ScriptedOutcome) -> Self {
        Self::new(move |operation, _| match operation {
            Operation::Prepare => answer.clone(),
            Operation::Unprepare => ScriptedOutcome::Devices(Vec::new()),
        })
    }

    /// Creates a response with one device, `null/null-0`, and the CDI name `VENDOR/null=UID`.
    pub fn ok(vendor: &str) -> Self {
        let vendor = vendor.to_owned();
        Self::new(move |_, claim| {
            let cdi_names = vec![format!("{vendor}/null={}", claim.uid)];
            ScriptedOutcome::Devices(vec![Device {
                pool: "null".into(),
                device: "null-0".into(),
                cdi_names,
                ..Device::default()
            }])
        })
    }

    pub(crate) fn decide(&self, operation: Operation, claim: &Claim) -> ScriptedOutcome {
        (self.0)(operation, claim)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthState {
    Unknown,
    Healthy,
    Unhealthy,
}

/// Reported health of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    pub pool: String,
    pub device: String,
    pub state: HealthState,
    /// Validity of the report in seconds; 0 is the receiver's default.
    pub timeout_seconds: i64,
    pub message: String,
}
