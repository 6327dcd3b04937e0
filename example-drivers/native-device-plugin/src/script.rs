//! What the plugin answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use nodedock_proto::kubelet::device_plugin::v1beta1 as api;
use tokio::sync::Notify;
use tonic::Code;

/// A device of the plugin's list.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    pub id: String,
    #[serde(default = "yes")]
    pub healthy: bool,
    /// Empty: it is near to no NUMA node.
    #[serde(default)]
    pub numa_nodes: Vec<i64>,
}

fn yes() -> bool {
    true
}

impl Device {
    pub fn healthy(id: &str) -> Self {
        Self { id: id.to_owned(), healthy: true, numa_nodes: Vec::new() }
    }

    pub fn unhealthy(id: &str) -> Self {
        Self { healthy: false, ..Self::healthy(id) }
    }

    #[must_use]
    pub fn on(mut self, numa_nodes: &[i64]) -> Self {
        self.numa_nodes = numa_nodes.to_vec();
        self
    }

    pub(crate) fn listed(&self) -> api::Device {
        let nodes: Vec<_> = self.numa_nodes.iter().map(|id| api::NumaNode { id: *id }).collect();
        api::Device {
            id: self.id.clone(),
            health: if self.healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
            topology: (!nodes.is_empty()).then_some(api::TopologyInfo { nodes }),
        }
    }
}

/// Out of what a plugin is asked to choose.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Choice {
    pub available: Vec<String>,
    pub must_include: Vec<String>,
    pub size: i32,
}

/// What becomes of a call. What a plugin should do is `Container` or `Status`; the rest is for tests.
#[derive(Debug, Clone)]
pub enum Answer {
    /// It went well; for other calls than Allocate the container does not matter.
    Container(Box<api::ContainerAllocateResponse>),
    /// An answer without a container.
    NoResponse,
    /// The call fails.
    Status(Code, String),
    /// No answer ever.
    Hang,
    /// The answer comes when this is notified.
    After(Arc<Notify>, Box<Answer>),
    /// The plugin ends in the middle of the call.
    Die,
}

impl Answer {
    /// One variable, `NATIVE_DEVICES`, with the devices' IDs.
    pub fn ok(device_ids: &[String]) -> Self {
        let envs = BTreeMap::from([("NATIVE_DEVICES".to_owned(), device_ids.join(","))]);
        Self::container(api::ContainerAllocateResponse { envs, ..Default::default() })
    }

    pub fn container(response: api::ContainerAllocateResponse) -> Self {
        Self::Container(Box::new(response))
    }

    /// A mount whose path leads elsewhere than it seems to.
    pub fn bad_path() -> Self {
        let mount = api::Mount {
            container_path: "/x/../../etc".to_owned(),
            host_path: "/etc".to_owned(),
            read_only: false,
        };
        Self::container(api::ContainerAllocateResponse { mounts: vec![mount], ..Default::default() })
    }

    pub fn refuse(why: &str) -> Self {
        Self::Status(Code::Unknown, why.to_owned())
    }
}

type OfDevices = dyn Fn(&[String]) -> Answer + Send + Sync;
type Choose = dyn Fn(&Choice) -> Vec<String> + Send + Sync;

/// Decides for each call.
#[derive(Clone)]
pub struct Script {
    pub(crate) allocate: Arc<OfDevices>,
    pub(crate) choose: Option<Arc<Choose>>,
    pub(crate) pre_start: Arc<OfDevices>,
    pub(crate) options: Answer,
}

impl Script {
    /// Says what an Allocate for these devices is answered; everything else goes well.
    pub fn new(allocate: impl Fn(&[String]) -> Answer + Send + Sync + 'static) -> Self {
        let pre_start = Arc::new(|_: &[String]| Answer::ok(&[]));
        Self { allocate: Arc::new(allocate), choose: None, pre_start, options: Answer::ok(&[]) }
    }

    /// Everything goes well.
    pub fn ok() -> Self {
        Self::new(Answer::ok)
    }

    /// The same for every Allocate.
    pub fn always(answer: Answer) -> Self {
        Self::new(move |_| answer.clone())
    }

    /// Offers GetPreferredAllocation.
    #[must_use]
    pub fn choose(mut self, choose: impl Fn(&Choice) -> Vec<String> + Send + Sync + 'static) -> Self {
        self.choose = Some(Arc::new(choose));
        self
    }

    #[must_use]
    pub fn pre_start(mut self, pre_start: impl Fn(&[String]) -> Answer + Send + Sync + 'static) -> Self {
        self.pre_start = Arc::new(pre_start);
        self
    }

    /// What an Allocate for these devices is answered.
    pub fn answer(&self, device_ids: &[String]) -> Answer {
        (self.allocate)(device_ids)
    }

    /// What becomes of GetDevicePluginOptions.
    #[must_use]
    pub fn options(mut self, answer: Answer) -> Self {
        self.options = answer;
        self
    }
}
