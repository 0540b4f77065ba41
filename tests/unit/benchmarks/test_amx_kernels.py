from benchmarks.amx_kernels import Product, form_of, read_products, table

PREFIX = "onednn_verbose,v1,primitive,exec,cpu"
AMX = "brg_matmul:avx512_core_amx"
SHAPE = {"num_hidden_layers": 1, "hidden_size": 512, "intermediate_size": 1536, "vocab_size": 24000}
DIMENSIONS = frozenset({512, 1536, 24000})


def matmul(problem: str, weights: str = "ab", implementation: str = AMX) -> str:
    memories = f"src:bf16::blocked:ab::f0 wei:bf16::blocked:{weights}::f0 dst:bf16::blocked:ab::f0"
    return f"{PREFIX},matmul,{implementation},undef,{memories},attr-scratchpad:user,,{problem},0.5"


def forms(*lines: str) -> list[str | None]:
    return [form_of(product, DIMENSIONS, 24000) for product in read_products(lines)]


def test_reads_products_and_nothing_else():
    lines = [
        "onednn_verbose,v1,info,oneDNN v3.12.0",
        f"{PREFIX},reorder,jit:uni,undef,src:f32::blocked:ba::f0 dst:f32::blocked:Ba4b::f0,,,512x512,0.9",
        "step 1/1 loss 10.1",
        matmul("8x64x64:8x64x64"),  # batched: attention
        "[rank 0] " + matmul("2048x512:512x1536", "ba"),
    ]
    assert list(read_products(lines)) == [Product("matmul", AMX, "undef", "bf16", "ba", 2048, 512, 1536)]


def test_reads_older_descriptors_and_inner_products():
    memories = "src_bf16::blocked:ab::f0 wei_bf16:a:blocked:AB16b64a2b::f0 dst_bf16::blocked:ab::f0"
    line = (
        f"onednn_verbose,exec,cpu,inner_product,brgemm:avx512_core_amx,backward_data,{memories},,,mb2048ic512oc1536,0.4"
    )
    (product,) = read_products([line])
    assert (product.source_dtype, product.weights_tag, product.m, product.k, product.n) == (
        "bf16",
        "AB16b64a2b",
        2048,
        512,
        1536,
    )
    assert form_of(product, DIMENSIONS, 24000) == "input gradient"


def test_tells_the_three_forms_apart():
    assert forms(
        matmul("2048x512:512x1536", "ba"),
        matmul("2048x1536:1536x512", "ab"),
        matmul("1536x2048:2048x512"),
        matmul("24000x512:512x512"),  # the head's weight gradient over a piece of 512 tokens
        matmul("2048x64:64x2048"),  # no linear of this model
    ) == ["forward", "input gradient", "weight gradient", "weight gradient", None]


def test_shares_count_what_onednn_never_saw_against_it():
    forward = [matmul("2048x512:512x1536", "ba")] * 8
    backward = [matmul("2048x1536:1536x512", "ab")] * 3 + [matmul("2048x1536:1536x512", "ab", "gemm:jit")]
    text, shares = table(read_products(forward + backward), SHAPE)
    assert shares == {"forward": 1.0, "input gradient": 3 / 8, "weight gradient": 0.0}
    assert f"| forward | {AMX} | bf16 | 8 |" in text
    assert "| weight gradient | none seen by oneDNN | | 0 |" in text
