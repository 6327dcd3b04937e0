//! The plugin's answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodedock_proto::kubelet::device_plugin::v1beta1 as api;
use tokio::sync::Notify;
use tonic::Code;

/// A device in the plugin's list.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub id: String,
    #[serde(default = "yes")]
    pub healthy: bool,
    /// Local NUMA nodes; may be empty.
    #[serde(default)]
    pub numa_nodes: Vec<i64>,
}

fn yes() -> bool {
    true
}

impl Device {
    pub fn healthy(id: &str) -> Self {
        Self {
            id: id.to_owned(),
            healthy: true,
            numa_nodes: Vec::new(),
        }
    }

    pub fn unhealthy(id: &str) -> Self {
        Self {
            healthy: false,
            ..Self::healthy(id)
        }
    }

    #[must_use]
    pub fn on(mut self, numa_nodes: &[i64]) -> Self {
        self.numa_nodes = numa_nodes.to_vec();
        self
    }

    pub(crate) fn listed(&self) -> api::Device {
        let nodes: Vec<_> = self
            .numa_nodes
            .iter()
            .map(|id| api::NumaNode { id: *id })
            .collect();
        api::Device {
            id: self.id.clone(),
            health: if self.healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
            topology: (!nodes.is_empty()).then_some(api::TopologyInfo { nodes }),
        }
    }
}

/// The devices from which a plugin chooses in GetPreferredAllocation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    pub available: Vec<String>,
    pub must_include: Vec<String>,
    pub size: i32,
}

/// Outcome of a call. A real plugin uses `Container` or `Status`; the rest is for tests.
#[derive(Debug, Clone)]
pub enum ScriptedOutcome {
    /// Success; for calls other than Allocate the container is not used.
    Container(Box<api::ContainerAllocateResponse>),
    /// A response without a container.
    NoResponse,
    /// The call fails with this status.
    Status(Code, String),
    /// The plugin never answers.
    Hang,
    /// The plugin answers when this is notified.
    After(Arc<Notify>, Box<ScriptedOutcome>),
    /// The plugin crashes in the middle of the call.
    Die,
}

impl ScriptedOutcome {
    /// Creates a response with one variable, `NATIVE_DEVICES`, with the devices' IDs.
    pub fn ok(device_ids: &[String]) -> Self {
        let envs = BTreeMap::from([("NATIVE_DEVICES".to_owned(), device_ids.join(","))]);
        Self::container(api::ContainerAllocateResponse {
            envs,
            ..Default::default()
        })
    }

    pub fn container(response: api::ContainerAllocateResponse) -> Self {
        Self::Container(Box::new(response))
    }

    /// Creates a response with a mount whose path contains `..`.
    pub fn bad_path() -> Self {
        let mount = api::Mount {
            container_path: "/x/../../etc".to_owned(),
            host_path: "/etc".to_owned(),
            read_only: false,
        };
        Self::container(api::ContainerAllocateResponse {
            mounts: vec![mount],
            ..Default::default()
        })
    }

    pub fn refuse(why: &str) -> Self {
        Self::Status(Code::Unknown, why.to_owned())
    }
}

type OfDevices = dyn Fn(&[String]) -> ScriptedOutcome + Send + Sync;
type Choose = dyn Fn(&Choice) -> Vec<String> + Send + Sync;

/// Decides the outcome of each call.
#[derive(Clone)]
pub struct Script {
    pub(crate) allocate: Arc<OfDevices>,
    pub(crate) choose: Option<Arc<Choose>>,
    pub(crate) pre_start: Arc<OfDevices>,
    pub(crate) options: ScriptedOutcome,
}

impl Script {
    /// Creates a script that decides the outcome of Allocate; every other call succeeds.
    pub fn new(allocate: impl Fn(&[String]) -> ScriptedOutcome + Send + Sync + 'static) -> Self {
        let pre_start = Arc::new(|_: &[String]| ScriptedOutcome::ok(&[]));
        Self {
            allocate: Arc::new(allocate),
            choose: None,
            pre_start,
            options: ScriptedOutcome::ok(&[]),
        }
    }

    /// Creates a script in which every call succeeds.
    pub fn ok() -> Self {
        Self::new(ScriptedOutcome::ok)
    }

    /// Creates a script with the same outcome for every Allocate.
    pub fn always(answer: ScriptedOutcome) -> Self {
        Self::new(move |_| answer.clone())
    }

    /// Offers GetPreferredAllocation.
    #[must_use]
    pub fn choose(
        mut self,
        choose: impl Fn(&Choice) -> Vec<String> + Send + Sync + 'static,
    ) -> Self {
        self.choose = Some(Arc::new(choose));
        self
    }

    #[must_use]
    pub fn pre_start(
        mut self,
        pre_start: impl Fn(&[String]) -> ScriptedOutcome + Send + Sync + 'static,
    ) -> Self {
        self.pre_start = Arc::new(pre_start);
        self
    }

    /// Returns the outcome of an Allocate for these devices.
    pub fn answer(&self, device_ids: &[String]) -> ScriptedOutcome {
        (self.allocate)(device_ids)
    }

    /// Returns the outcome of GetDevicePluginOptions.
    #[must_use]
    pub fn options(mut self, answer: ScriptedOutcome) -> Self {
        self.options = answer;
        self
    }
}
