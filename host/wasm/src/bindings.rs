//! The code that `bindgen!` generates for the contract. Only `convert` and the host functions see these types.

#![allow(unreachable_pub, unused_variables, clippy::all)]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "full-driver",
    imports: {
        "nodedock:driver/log": trappable,
        default: async | trappable,
    },
    exports: { default: async },
});
