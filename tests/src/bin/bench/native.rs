//! A native plugin beside a WASM driver: the same claim, the same daemon, the same run. And many plugins at once.

use std::time::Instant;

use native_null::{Options as PluginOptions, Plugin, Script};
use nodedock_proto::kubelet::dra::v1;
use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use nodedock_tests::node_api::channel;
use nodedock_tests::{Daemon, Root, compose};

use crate::claims::{come_and_go, daemon, measured, storm};
use crate::table::{Table, Times, millis};
use crate::{CdiOnTmpfs, Size};

pub(crate) async fn run(size: Size, table: &mut Table) {
    side_by_side(size, table).await;
    many(size, table).await;
}

async fn plugin(root: &Root, driver: &str) -> Plugin {
    let options = PluginOptions::new(
        driver,
        &root.state().join("plugins_registry"),
        &root.path().join("p"),
    );
    Plugin::start(options, Script::ok(driver))
        .await
        .expect("start a plugin")
}

async fn registered(daemon: &Daemon, plugin: &Plugin) {
    daemon
        .until_serving(&plugin.registration_socket().to_string_lossy())
        .await;
}

async fn side_by_side(size: Size, table: &mut Table) {
    let cdi = CdiOnTmpfs::new();
    let daemon = daemon(&cdi).await;
    let plugin = plugin(&daemon, "null.example.com").await;
    registered(&daemon, &plugin).await;
    let wasm = "prepare through a WASM driver";
    for native in [false, true] {
        let (mut prepares, mut unprepares) = (Times::default(), Times::default());
        let mut client = daemon.client();
        for n in 0..size.single {
            let request = if native {
                native_request(n)
            } else {
                measured(n)
            };
            come_and_go(&mut client, request, &mut prepares, &mut unprepares).await;
        }
        let (what, against) = if native {
            ("prepare through a native plugin", wasm)
        } else {
            (wasm, "")
        };
        table.times(what, &prepares, against, "the same daemon, one at a time");
        let what = what.replacen("prepare", "unprepare", 1);
        table.times(
            &what,
            &unprepares,
            if native {
                "unprepare through a WASM driver"
            } else {
                ""
            },
            "",
        );
    }
    bare(size, &plugin, table).await;
}

fn native_request(n: usize) -> nodedock_proto::node::v1::PreparePodRequest {
    let name = format!("native-{n}");
    compose::request(
        &compose::pod(&name),
        &[&compose::claim(
            &name,
            &[&format!("null.example.com/null/null-{n}")],
        )],
    )
}

/// The call to the plugin alone, as the daemon makes it, from here.
async fn bare(size: Size, plugin: &Plugin, table: &mut Table) {
    let mut client = DraPluginClient::new(channel(plugin.endpoint().to_owned()));
    let mut times = Times::default();
    for n in 0..size.single {
        let claim = v1::Claim {
            namespace: "default".into(),
            uid: format!("u-{n}"),
            name: format!("c-{n}"),
        };
        let request = v1::NodePrepareResourcesRequest {
            claims: vec![claim],
        };
        times
            .time(client.node_prepare_resources(request))
            .await
            .expect("a bare call");
    }
    let against = "prepare through a native plugin";
    table.times(
        "bare gRPC round trip to the plugin",
        &times,
        against,
        "no daemon between",
    );
}

async fn many(size: Size, table: &mut Table) {
    let daemon = Daemon::start_on(Root::new(), CdiOnTmpfs::new().options()).await;
    let before = daemon.memory_mib("VmRSS");
    let started = Instant::now();
    let mut plugins = Vec::with_capacity(size.plugins);
    for n in 0..size.plugins {
        plugins.push(plugin(&daemon, &format!("p{n}.example.com")).await);
    }
    for plugin in &plugins {
        registered(&daemon, plugin).await;
    }
    let (took, count) = (millis(started.elapsed()), size.plugins);
    let row = format!("{count} plugins at once: all registered");
    table.figures(&row, vec![took], "ms", "", "from the first socket");
    let each = (daemon.memory_mib("VmRSS") - before) * 1024.0 / count as f64;
    table.figures(
        "memory of the daemon per registered plugin",
        vec![each],
        "KiB",
        "",
        "",
    );
    let requests = (0..count).map(|n| {
        let name = format!("pod-{n}");
        let device = format!("p{n}.example.com/null/null-0");
        compose::request(&compose::pod(&name), &[&compose::claim(&name, &[&device])])
    });
    let started = Instant::now();
    let (times, failed) = storm(daemon.client(), requests.collect()).await;
    assert_eq!(failed, 0, "prepares through many plugins");
    let rate = format!(
        "{:.0} claims/s",
        count as f64 / started.elapsed().as_secs_f64()
    );
    table.times(
        &format!("prepare, a claim at each of {count} plugins"),
        &times,
        "",
        &rate,
    );
}
