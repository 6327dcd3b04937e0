//! Lists of devices that are absurd, and plugins that come and change too fast.

use std::time::Duration;

use native_device_plugin::{Device, Script, ScriptedOutcome};
use nodedock_tests::Daemon;
use tokio::time::interval;

use super::agreement::agree;
use super::{NIC, calling, freed, ids, limited, nics, ready, started, with_nics};

const OTHER: &str = "example.com/other";

#[tokio::test]
async fn pod_gets_thousands_of_devices() {
    let daemon = Daemon::start().await;
    // A variable with all IDs would be longer than Linux accepts.
    let script = Script::always(ScriptedOutcome::container(Default::default()));
    let plugin = with_nics(&daemon, script, 1).await;
    // One for each MiB of the memory of some GPUs, as plugins that divide them list.
    plugin.list(
        (0..120_000)
            .map(|n| Device::healthy(&format!("GPU-8f6d2c1e-0b1c-4f5e-9a7b-{n:012}")))
            .collect(),
    );
    daemon.until_allocatable(NIC, 120_000).await;
    let answer = ready(&daemon, limited("one", &[(NIC, 8000)])).await;
    assert_eq!(ids(&answer, "main", NIC).len(), 8000);
    assert_eq!(agree(&daemon).await.len(), 8000);
    freed(&daemon, "one").await;
}

#[tokio::test]
async fn flapping_devices_delay_no_other_resource() {
    let daemon = Daemon::start().await;
    let flapping = with_nics(&daemon, Script::ok(), 100).await;
    let _other = started(&daemon, calling(&daemon, OTHER), Script::ok(), nics(2)).await;
    let lists = [
        nics(100),
        (0..100)
            .map(|n| Device::unhealthy(&format!("nic-{n}")))
            .collect(),
    ];
    let flap = async {
        let mut pace = interval(Duration::from_millis(1));
        for turn in 0.. {
            pace.tick().await;
            flapping.list(lists[turn % 2].clone());
        }
    };
    let allocate = async {
        for round in 0..30 {
            let name = format!("p{round}");
            ready(&daemon, limited(&name, &[(OTHER, 2)])).await;
            assert_eq!(freed(&daemon, &name).await.len(), 1);
            // Given or refused: the response comes at once either way.
            let answer = daemon.prepare(limited(&name, &[(NIC, 1)])).await;
            assert_eq!(answer.resources.len(), 1);
            freed(&daemon, &name).await;
        }
    };
    tokio::select! {
        () = flap => unreachable!("it has no end"),
        () = allocate => {}
    }
    flapping.list(nics(7));
    daemon.until_allocatable(NIC, 7).await;
    assert!(agree(&daemon).await.is_empty());
    ready(&daemon, limited("after", &[(NIC, 7)])).await;
}
