//! Death while an adapter is switched, and in a prepare by its device plugin: what was decided holds or does not, and no device is lost.

use native_device_plugin::{Device, Options as PluginOptions, Plugin, Script};
use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::{Daemon, Options};

use crate::scene::assert_killed;
use crate::{Place, every_pass};

pub(crate) const POINTS: [Point; 2] = [Point::AdapterDecided, Point::AdapterRecorded];

const RESOURCE: &str = "example.com/nic";
const DRIVER: &str = "nic.example.com";
const ADAPTED: &str =
    "devicePluginAdapters: [{resource: example.com/nic, driver: nic.example.com, pool: nics}]\n";

async fn is_enabled(daemon: &Daemon) -> bool {
    let answer = daemon
        .client()
        .list_adapters(v1::ListAdaptersRequest {})
        .await
        .expect("it answers");
    answer.into_inner().adapters.remove(0).enabled
}

async fn switch(daemon: &Daemon, enabled: bool) -> Result<(), tonic::Status> {
    let request = v1::SwitchAdapterRequest {
        driver: DRIVER.to_owned(),
        enabled,
    };
    daemon.client().switch_adapter(request).await.map(drop)
}

#[tokio::test]
async fn crash_leaves_adapter_switched_or_unchanged() {
    for point in [Point::AdapterDecided, Point::AdapterRecorded] {
        let mut daemon = Daemon::start_with(Options::default().config(ADAPTED)).await;
        let deaths = every_pass(point, async |pass| {
            let _place = Place(format!("at {point:?}, pass {pass}"));
            daemon.arm(point, pass);
            daemon.restart().await;
            let before = is_enabled(&daemon).await;
            let outcome = switch(&daemon, !before).await;
            let died = outcome.is_err();
            if died {
                assert_killed(daemon.ended().await);
            }
            daemon.disarm();
            if died {
                daemon.run().await;
                let is_durable = point == Point::AdapterRecorded;
                assert_eq!(is_enabled(&daemon).await, before != is_durable);
            }
            switch(&daemon, !before).await.expect("the same again");
            assert_eq!(is_enabled(&daemon).await, !before);
            died
        });
        assert_eq!(deaths.await, 1);
    }
}

#[tokio::test]
async fn claim_is_prepared_after_lost_answer() {
    let point = Point::AllocateAnswered;
    let mut daemon = Daemon::start_with(Options::default().config(ADAPTED)).await;
    daemon.arm(point, 1);
    daemon.restart().await;
    let options = PluginOptions::new(RESOURCE, &daemon.state().join("device-plugins"));
    let plugin = Plugin::start(options, Script::ok(), vec![Device::healthy("nic-0")]).await;
    let plugin = plugin.expect("it registers");
    daemon.until_allocatable(RESOURCE, 1).await;
    let asked = |name: &str| {
        let claim = claim(&format!("of-{name}"), &[&format!("{DRIVER}/nics/nic-0")]);
        request(&pod(name), &[&claim])
    };
    daemon
        .client()
        .prepare_pod(asked("one"))
        .await
        .expect_err("the daemon dies");
    assert_killed(daemon.ended().await);
    daemon.disarm();
    daemon.run().await;
    // What it had begun keeps the device from others, and ends with its pod.
    let refused = daemon.refused(asked("two")).await;
    assert_eq!(refused.code, "device-held", "{refused:?}");
    plugin.serve().expect("its socket is made");
    plugin.register().await.expect("it registers");
    daemon.until_allocatable(RESOURCE, 1).await;
    daemon.prepared(asked("one")).await;
    assert_eq!(daemon.cdi_files().len(), 1);
    daemon.unprepare(&pod("one")).await;
    daemon.prepared(asked("two")).await;
    daemon.unprepare(&pod("two")).await;
    daemon.assert_empty().await;
}
