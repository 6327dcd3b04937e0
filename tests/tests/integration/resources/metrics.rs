//! What is counted of device plugins, under a kubelet's names.

use native_device_plugin::Script;
use nodedock_tests::Daemon;

use super::{NIC, limited, ready, with_nics};

#[tokio::test]
async fn registrations_and_allocations_are_counted_by_resource() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 2).await;
    ready(&daemon, limited("one", &[(NIC, 1)])).await;
    let resource = [("resource_name", NIC)];
    let found = daemon.metrics().await;
    assert_eq!(found.value("kubelet_device_plugin_registration_total", &resource), Some(1.0));
    assert_eq!(found.value("kubelet_device_plugin_alloc_duration_seconds_count", &resource), Some(1.0));
    drop(plugin);
    let _again = with_nics(&daemon, Script::ok(), 2).await;
    let found = daemon.metrics().await;
    assert_eq!(found.value("kubelet_device_plugin_registration_total", &resource), Some(2.0));
}
