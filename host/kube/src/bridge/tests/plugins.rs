//! Native device plugins, which the kubelet calls through the bridge.

use nodedock_core::driver::{DeviceDriver, DeviceLists, DeviceOptions};
use nodedock_model::{
    AllocationMount, AllocationNode, ContainerAllocation, OfferSource, PluginDevice,
};
use nodedock_proto::kubelet::device_plugin::v1beta1 as api;
use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;

use super::resources::{kubelet, listed, sockets};
use super::*;

const RESOURCE: &str = "example.com/gpu";
const ALL: DeviceOptions = DeviceOptions {
    pre_start_required: true,
    preferred_allocation_available: true,
};

/// A plugin that prefers the last device, and refuses the device `refused`.
struct FakePlugin {
    options: DeviceOptions,
    calls: Mutex<Vec<String>>,
}

impl FakePlugin {
    fn new(options: DeviceOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            calls: Mutex::default(),
        })
    }

    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn note(&self, what: &str, ids: &[String]) {
        self.calls
            .lock()
            .unwrap()
            .push(format!("{what} {}", ids.join(",")));
    }
}

fn answer() -> ContainerAllocation {
    ContainerAllocation {
        env: [("GPU".to_owned(), "b".to_owned())].into(),
        mounts: vec![AllocationMount {
            host_path: "/lib".into(),
            container_path: "/gpu".into(),
            read_only: true,
        }],
        device_nodes: vec![AllocationNode {
            host_path: "/dev/gpu0".into(),
            container_path: "/dev/gpu".into(),
            permissions: "rw".into(),
        }],
        annotations: [("example.com/gpu".to_owned(), "b".to_owned())].into(),
        cdi_devices: vec!["example.com/gpu=b".to_owned()],
    }
}

#[async_trait]
impl DeviceDriver for FakePlugin {
    fn options(&self) -> DeviceOptions {
        self.options
    }

    async fn list_and_watch(&self, _: &Call) -> Result<DeviceLists, Problem> {
        unreachable!("the device manager has its lists")
    }

    async fn allocate(&self, _: &Call, ids: &[String]) -> Result<ContainerAllocation, Problem> {
        self.note("allocate", ids);
        let refused = || Problem::unavailable("plugin-refused", "the device is warm");
        if ids.iter().any(|id| id == "refused") {
            Err(refused())
        } else {
            Ok(answer())
        }
    }

    async fn preferred_allocation(
        &self,
        _: &Call,
        available: &[String],
        _: &[String],
        _: u32,
    ) -> Result<Vec<String>, Problem> {
        self.note("prefer", available);
        if available.iter().any(|id| id == "lost") {
            return Err(Problem::internal("lost", "GPU is lost"));
        }
        Ok(available.last().cloned().into_iter().collect())
    }

    async fn pre_start(&self, _: &Call, ids: &[String]) -> Result<(), Problem> {
        self.note("start", ids);
        Ok(())
    }
}

impl Node {
    /// A plugin registers, and lists devices, in capitals those that are not healthy.
    fn plug(
        &self,
        plugin: &Arc<FakePlugin>,
        devices: &[&str],
    ) -> nodedock_core::manager::devices::PluginId {
        let id = self.manager.devices.plugin_arrived(
            resource(),
            "/plugins/gpu.sock".into(),
            plugin.clone(),
        );
        let device = |id: &&str| PluginDevice {
            id: id.to_lowercase(),
            healthy: id.to_lowercase() == **id,
            numa_nodes: vec![],
        };
        self.manager
            .devices
            .plugin_listed(&id, &devices.iter().map(device).collect::<Vec<_>>());
        id
    }
}

async fn client(node: &Node) -> DevicePluginClient<Channel> {
    let [socket] = &sockets(node)[..] else {
        panic!("one socket")
    };
    DevicePluginClient::new(
        connect(&node.root().join("device-plugins").join(socket))
            .await
            .unwrap(),
    )
}

fn registrations(run: &Running) -> u64 {
    let labels = [
        ("resource", RESOURCE.to_owned()),
        ("outcome", "registered".to_owned()),
    ];
    run.bridge
        .metrics()
        .resource_registrations
        .get_or_create(&labels)
        .get()
}

#[tokio::test]
async fn kubelet_calls_reach_the_plugin() {
    let (node, plugin) = (Node::with_grace(PATIENCE), FakePlugin::new(ALL));
    let (kubelet, run) = (kubelet(&node).await, node.start());
    let id = node.plug(&plugin, &["a", "b", "REFUSED"]);
    listed(&kubelet, "abREFUSED").await;
    let allocation = kubelet.allocate(RESOURCE, 1).await.unwrap();
    assert_eq!(
        (allocation.ids, plugin.calls()),
        (
            vec!["b".to_owned()],
            vec!["prefer a,b".into(), "allocate b".into()]
        )
    );
    let expected = api::ContainerAllocateResponse {
        envs: answer().env.into_iter().collect(),
        mounts: vec![api::Mount {
            host_path: "/lib".into(),
            container_path: "/gpu".into(),
            read_only: true,
        }],
        devices: vec![api::DeviceSpec {
            host_path: "/dev/gpu0".into(),
            container_path: "/dev/gpu".into(),
            permissions: "rw".into(),
        }],
        annotations: answer().annotations.into_iter().collect(),
        cdi_devices: vec![api::CdiDevice {
            name: "example.com/gpu=b".into(),
        }],
    };
    assert_eq!(allocation.answer, expected);
    assert!(
        node.manager.records.claims().is_empty(),
        "the kubelet alone has the allocation"
    );

    let mut client = client(&node).await;
    client
        .pre_start_container(api::PreStartContainerRequest {
            devices_ids: vec!["b".into()],
        })
        .await
        .unwrap();
    assert_eq!(plugin.calls(), ["start b"]);
    for (device, why) in [
        ("refused", "the device is warm"),
        ("other", "no device of example.com/gpu"),
    ] {
        let container = api::ContainerAllocateRequest {
            devices_ids: vec![device.into()],
        };
        let request = api::AllocateRequest {
            container_requests: vec![container],
        };
        let refused = client.allocate(request).await.unwrap_err();
        assert!(refused.message().contains(why), "{refused}");
    }

    node.manager
        .devices
        .plugin_left(&id, &Problem::unavailable("gone", "of the test"));
    listed(&kubelet, "ABREFUSED").await;
    node.plug(&plugin, &["a"]);
    listed(&kubelet, "a").await;
    assert_eq!(registrations(&run), 1);
    run.drain().await;
}

/// A kubelet refuses the pod if the call fails.
#[tokio::test]
async fn failed_preference_is_answered_as_empty() {
    let (node, plugin) = (Node::with_grace(PATIENCE), FakePlugin::new(ALL));
    let (kubelet, run) = (kubelet(&node).await, node.start());
    node.plug(&plugin, &["a", "lost"]);
    listed(&kubelet, "alost").await;
    assert_eq!(kubelet.allocate(RESOURCE, 1).await.unwrap().ids.len(), 1);
    assert_eq!(plugin.calls()[0], "prefer a,lost");
    run.drain().await;
}

#[tokio::test]
async fn changed_options_register_plugin_again() {
    let node = Node::new();
    let (kubelet, run) = (kubelet(&node).await, node.start());
    node.plug(&FakePlugin::new(DeviceOptions::default()), &["a", "b"]);
    listed(&kubelet, "ab").await;
    assert_eq!(
        kubelet.allocate(RESOURCE, 1).await.unwrap().ids,
        ["a"],
        "it is not asked what it prefers"
    );
    let newer = FakePlugin::new(ALL);
    node.plug(&newer, &["a", "b", "c"]);
    run.until("it is not registered again", |run| registrations(run) == 2)
        .await;
    listed(&kubelet, "abc").await;
    assert_eq!(kubelet.allocate(RESOURCE, 1).await.unwrap().ids, ["c"]);
    let options = client(&node)
        .await
        .get_device_plugin_options(api::Empty {})
        .await
        .unwrap()
        .into_inner();
    assert!(options.pre_start_required && options.get_preferred_allocation_available);
    run.drain().await;
}

#[tokio::test]
async fn plugin_devices_are_listed_after_restart() {
    let (before, plugin) = (Node::new(), FakePlugin::new(ALL));
    let run = before.start();
    before.plug(&plugin, &["a", "b"]);
    let is_of_plugin = |offer: &ResourceOffer| matches!(offer.source, OfferSource::Plugin(_));
    run.until("stored", |_| {
        before.offered().resources.iter().any(is_of_plugin)
    })
    .await;
    run.drain().await;

    // The managers of another start.
    let node = Node::new();
    let parts = BridgeParts {
        offered_before: before.offered(),
        ..node.parts()
    };
    let (kubelet, run) = (kubelet(&node).await, Running::start(parts));
    listed(&kubelet, "ab").await;
    let (allocation, ()) = tokio::join!(kubelet.allocate(RESOURCE, 1), async {
        // Two looks later the call is there, and waits.
        run.looked().await;
        node.plug(&plugin, &["b", "c"]);
    });
    assert_eq!(allocation.unwrap().answer.envs["GPU"], "b");
    listed(&kubelet, "bc").await;
    run.drain().await;
}
