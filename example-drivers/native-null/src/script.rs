//! What the plugin answers.

use std::sync::Arc;

use tokio::sync::Notify;
use tonic::Code;

/// A claim as a call carries it: no allocation, which a plugin reads from the API server.
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

/// A device of an answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Base names; none means every request of the claim.
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    /// Qualified names, `VENDOR/CLASS=NAME`, of CDI files that the plugin wrote.
    pub cdi_names: Vec<String>,
    /// Not in `v1beta1`.
    pub share_id: Option<String>,
}

/// What becomes of one claim of a call. What a plugin should do is `Devices` or `Error`; the rest is for tests.
#[derive(Debug, Clone)]
pub enum Answer {
    /// It went well; for an unprepare the devices do not matter.
    Devices(Vec<Device>),
    Error(String),
    /// The claim is left out of the answer.
    Skip,
    /// The claim is in the answer twice.
    Twice(Vec<Device>),
    /// Somebody else's claim is in the answer as well.
    Stranger(String, Vec<Device>),
    /// Somebody else's claim is in the answer instead.
    Instead(String, Vec<Device>),
    /// An error of so many bytes.
    Huge(usize),
    /// The whole call fails.
    Status(Code, String),
    /// No answer ever.
    Hang,
    /// The answer comes when this is notified.
    After(Arc<Notify>, Box<Answer>),
    /// The plugin ends in the middle of the call.
    Die,
}

type Decide = dyn Fn(Operation, &Claim) -> Answer + Send + Sync;

/// Decides for each claim.
#[derive(Clone)]
pub struct Script(Arc<Decide>);

impl Script {
    pub fn new(decide: impl Fn(Operation, &Claim) -> Answer + Send + Sync + 'static) -> Self {
        Self(Arc::new(decide))
    }

    /// The same for every claim that is prepared; every unprepare goes well.
    pub fn prepare(answer: Answer) -> Self {
        Self::new(move |operation, _| match operation {
            Operation::Prepare => answer.clone(),
            Operation::Unprepare => Answer::Devices(Vec::new()),
        })
    }

    /// One device, `null/null-0`, under the CDI name `VENDOR/null=UID`.
    pub fn ok(vendor: &str) -> Self {
        let vendor = vendor.to_owned();
        Self::new(move |_, claim| {
            let cdi_names = vec![format!("{vendor}/null={}", claim.uid)];
            Answer::Devices(vec![Device {
                pool: "null".into(),
                device: "null-0".into(),
                cdi_names,
                ..Device::default()
            }])
        })
    }

    pub(crate) fn decide(&self, operation: Operation, claim: &Claim) -> Answer {
        (self.0)(operation, claim)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthState {
    Unknown,
    Healthy,
    Unhealthy,
}

/// What is said of a device's health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceHealth {
    pub pool: String,
    pub device: String,
    pub state: HealthState,
    /// For how long it counts; 0 is the listener's default.
    pub timeout_seconds: i64,
    pub message: String,
}
