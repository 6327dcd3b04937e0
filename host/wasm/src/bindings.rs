//! The code that `bindgen!` generates for the contract. Of its types, other crates see only `Trigger`.

#![allow(unreachable_pub, unused_variables, clippy::all)]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "full-driver",
    imports: {
        "nodedock:driver/log": trappable,
        default: async | trappable,
    },
    exports: { default: async },
    // A refusal is a result of a host function, and not a trap.
    trappable_error_type: { "nodedock:driver/types.problem" => nodedock_model::Problem },
});
