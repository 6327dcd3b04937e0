//! A registration socket made by a driver in Rust, called as the kubelet calls it: with grpc-go, by the bare path.

use native_null::{Options, Plugin, Script};
use nodedock_tests::Root;
use nodedock_tests::machine::or_skip;
use serde_json::{Value, json};

use crate::{lines, programs};

#[tokio::test]
async fn kubelet_dialer_reaches_rust_driver() {
    let Some(agent) = or_skip(
        "a registration socket called by a program in Go",
        programs::go("agent"),
    ) else {
        return;
    };
    let root = Root::new();
    let options = Options::new("gpu.example.com", root.path(), root.path());
    let endpoint = options.endpoint.display().to_string();
    let plugin = Plugin::start(options, Script::ok("gpu.example.com"))
        .await
        .expect("new sockets");
    let socket = plugin.registration_socket();
    let said = lines(&agent, &["register", socket.to_str().expect("UTF-8")]).await;
    let info: Value = serde_json::from_str(&said.concat()).expect("JSON");
    let (name, versions) = ("gpu.example.com", ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    assert_eq!(
        info,
        json!({"type": "DRAPlugin", "name": name, "endpoint": endpoint, "versions": versions})
    );
    assert_eq!(plugin.notified().await, (true, String::new()));
}
