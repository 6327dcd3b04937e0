//! The node API, asked by programs that call themselves after the socket's path.

use nodedock_proto::node::v1;
use nodedock_proto::prost::Message;
use nodedock_tests::{Daemon, Options, machine};
use std::path::Path;

use crate::{lines, programs};

#[tokio::test]
async fn go_client_dialing_path_is_answered() {
    match programs::go("agent") {
        Ok(agent) => learns_the_drivers(&agent, &["node-api"]).await,
        Err(why) => machine::skip("the node API asked by a program in Go", &why),
    }
}

#[tokio::test]
async fn a_program_in_python_is_answered() {
    let script = programs::sources("python").join("list_drivers.py");
    match programs::python() {
        Ok(python) => learns_the_drivers(&python, &[script.to_str().expect("UTF-8")]).await,
        Err(why) => machine::skip("the node API asked by a program in Python", &why),
    }
}

/// The program writes the answers to two calls in hex; what is in them is for us to read.
async fn learns_the_drivers(program: &Path, args: &[&str]) {
    let daemon = Daemon::with_gpus(Options::default()).await;
    let socket = daemon.socket();
    let args = [args, &[socket.to_str().expect("UTF-8")]].concat();
    let answers = lines(program, &args).await;
    assert_eq!(answers.len(), 2, "{answers:?}");
    for answer in answers {
        let answer = v1::ListDriversResponse::decode(&*hex::decode(answer).expect("hex"))
            .expect("an answer");
        assert_eq!(answer.drivers, daemon.drivers().await);
    }
}
