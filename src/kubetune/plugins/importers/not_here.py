"""Keys of other tools that have no counterpart here: what they are for, or what to use instead.

A key is looked up if no row of its tool takes it. The first pattern that fits says why, so an exception stands before its
pattern; a test finds patterns that an earlier one covers.
"""

from __future__ import annotations

from typing import Any

# Keys that change memory, speed or files, but no result.
_NO_EFFECT = "has no counterpart; it concerns memory, speed or files, and no result"
_AT_ZERO = "adapters begin at zero, and stay the same ones through a run"
_ONE_RATE = "one learning rate for all that is trained"
_OWN_CODE = (
    "code and registries of your own are not read; name files or data sets of the hub in data.train"
)
_OF_VERL = "a setting of verl's workers or of another method, which has no counterpart"
_NODES = "several nodes: see compute.nodes and `kubetune submit`"
_QUANTISED = "the base is quantised by `quantization`"
_NOT_SPLIT = (
    "no splitting along a sequence or layer: data are dealt to processes, and weights sharded by "
    "training.parallelism: fsdp, or shard_base under LoRA"
)

# By names and patterns: the reason, or a tuple of it and the values with which these keys do nothing.
DROPPED: dict[str, Any] = {
    "use_galore use_apollo use_badam use_adam_mini use_muon":
        ("kubetune has AdamW and its 8-bit form (training.optim)", False),
    "muon_lr":
        _ONE_RATE,
    "galore_* apollo_* badam_* qgalore_* dion_* muon_* grokfast_* adam_beta3 adam_epsilon2 optim_target_modules "
    "optimizer sgd_momentum exp_avg_dtype exp_avg_sq_dtype main_params_dtype main_grads_dtype "
    "use_precision_aware_optimizer":
        "kubetune has AdamW and its 8-bit form (training.optim)",
    "offload_teacher_model":
        "the teacher stays where it is; one too large for a GPU is read in shards, or asked by its servers",
    "optimizer_cpu_offload optimizer_offload_fraction offload_* *_cpu_offload layer_offloading "
    "lora_on_cpu kt_* use_kt optimizer_cuda_graph":
        "nothing is moved to the host; use training.parallelism: auto where the model does not fit one GPU",
    "freeze_trainable_* freeze_extra_modules freeze_parameters* trainable_parameters* freeze_mm_modules lisa_* "
    "spectrum_* use_llama_pro llamapro_* unfrozen_*":
        "either adapters or every parameter is trained; lora.target_modules says which layers learn",
    "adapters lora_model_dir adapter_name_or_path "
    "create_new_adapter mcore_adapter adapter_folder ref_adapters resume_only_model":
        "no run begins from an adapter; merge it into the model",
    "loraplus_* lorap_lr_ratio vit_lr aligner_lr embedding_lr* lr_groups lr_div_factor":
        _ONE_RATE,
    "init_weights":
        (_AT_ZERO, True),
    "pissa_init":
        (_AT_ZERO, False),
    "peft_init_lora_weights pissa_* lora_ga_* peft peft_layer_replication reinit_weights mora mora_* relora*":
        _AT_ZERO,
    "freeze_llm freeze_language_model":
        ("the language model always learns, through adapters or whole", False),
    "oft_* boft_* vera_* adalora_* reft_* fourier_* adapter_act adapter_length module_dropout mixture_of_depths "
    "train_from_scratch":
        "kubetune has LoRA, rsLoRA and DoRA, or trains every parameter",
    "lora_rank_pattern lora_alpha_pattern peft_layers_* peft_trainable_token_indices peft_ensure_weight_tying "
    "peft_autocast_adapter_dtype lora_dtype":
        "every adapter of a run has one rank and one scale; lora.target_modules may be a regular expression",
    "noisy_embedding_alpha neftune_noise_alpha":
        ("kubetune adds no noise to embeddings", 0),
    "jagged_restart_* lr_quadratic_warmup lr_decay_iters lr_warmup_init lr_wsd_* *_weight_decay "
    "weight_decay_incr_style apply_wd_to_qk_layernorm":
        "schedules are cosine, linear and constant, after one linear warm-up; weight decay stays as it is",
    "ref_model* ref_adapter* sync_ref_model reference_free precompute_ref_*":
        "a setting of preference tuning; it has no effect in supervised fine-tuning",
    "beta pref_* dpo_* kto_* orpo_alpha cpo_alpha rpo_alpha rl_beta simpo_gamma ld_alpha label_smoothing "
    "desirable_weight undesirable_weight f_divergence_type center_rewards_coefficient max_completion_length "
    "max_prompt_len sft_alpha loss_weights calculate_KL":
        "a setting of preference tuning; it has no effect in supervised fine-tuning",
    "reward_model_plugin":
        _OWN_CODE,
    "trl reward_funcs vllm vllm_* sglang_* infer_* ppo_* reward_model_* grpo_* num_iterations num_generations* "
    "epsilon epsilon_high delta advantage_estimator kl_in_reward scale_rewards reward_weights "
    "steps_per_generation generation_batch_size dynamic_sample max_resample_times overlong_filter soft_* "
    "cosine_min_len* cosine_max_len* repetition_n_grams repetition_max_penalty importance_sampling_level "
    "rollout_* log_rollout_* off_policy_* fipo_* tau_pos tau_neg real_tau top_entropy_quantile log_entropy "
    "log_completions multi_turn_scheduler max_turns async_generate completion_length_limit_scope gym_env "
    "use_gym_env nemo_gym_* ebft move_model_batches sleep_level wandb_log_unique_prompts router_replay_mode "
    "use_vllm structured_outputs_regex num_generation_samples":
        "a setting of learning by reward that kubetune does not have: servers of the tool itself (see grpo.servers), "
        "environments, other losses than `task: grpo` has",
    "kd_* teacher_* gkd_* lmbda seq_kd logprobs top_logprobs":
        "`task: distill` learns from a teacher that is a model, and not from log-probabilities in the data",
    "use_dft_loss use_asft_loss use_eaft_loss use_eaft enable_dft_loss enable_channel_loss":
        ("cross-entropy is the only loss of supervised fine-tuning", False),
    "asft_alpha eaft_* mrl_dims is_binary_loss_scale diffusion scaling_softmax* calculate_per_token_loss mtp_* "
    "num_labels problem_type cls_model_config do_causal_lm_eval decision_*":
        "cross-entropy is the only loss of supervised fine-tuning; classifiers have a task of their own",
    "router_aux_loss_coef moe_aux_loss_coef moe_z_loss_coeff":
        "set training.router_aux_loss_coef or router_z_loss_coef where routers learn",
    "disable_shuffling train_sampling_strategy curriculum_sampling shuffle_before_merging_datasets "
    "shuffle_buffer_size val_dataset_shuffle data_sharding dataset_shard_* ignore_data_skip":
        "rows are shuffled, each epoch anew, by training.seed",
    "cached_dataset cached_val_dataset custom_dataset_info external_plugins custom_register_path callbacks "
    "trainer_cls recipe axolotl_config_path local_repo_path":
        _OWN_CODE,
    "stopping_strategy stop_words download_mode disable_auto_column_mapping dataset_keep_in_memory "
    "preprocess_iterable packing_num_proc preprocessing_batch_size data_shared_file_system "
    "num_dataset_shards_to_save dataset_prepared_* pretraining_sample_concatenation":
        "data are prepared once, from the files that data.train names; its columns too",
    "min_sample_len eval_sequence_len max_packed_sequence_len max_seq_len pose_* use_pose sample_packing_* "
    "packing_strategy streaming_multipack_* pretrain_multipack_* multipack_* batch_flattening "
    "sequence_packing_scheduler":
        "rows have at most data.max_length tokens, and are packed to it (data.packing)",
    "system default_system":
        "put a system message into the data; the model then sees it at inference too",
    "interleave_prob interleave_probs":
        "give each source a `weight`: how often it appears in an epoch",
    "agent_template "
    "tool_format default_system_message chat_template_kwargs role_boundaries preserve_thinking enable_thinking "
    "add_non_thinking_prefix disable_ignore_empty_think template_backend response_prefix norm_bbox":
        "prompts are written by the chat template, from the data as they stand",
    "quantize_moe_experts gptq":
        (_QUANTISED, False),
    "qat model_quantization_config":
        _QUANTISED,
    "quantization_method quant_method":
        ("the base is quantised by bitsandbytes", "bnb", "bitsandbytes", "BNB"),
    "rope_scaling max_model_len model_max_length overrides_of_model_* model_kwargs init_strategy type_of_model "
    "model_quantization_config_kwargs bnb_config_kwargs bnb_4bit_* quantization quantization_device_map "
    "nonexpert_quantization hqq_axis nvfp4_* dsv4_* use_dsv4_* fp32_* embeddings_skip_upcast "
    "is_qwen_derived_model language_model_only processor_kwargs perform_initialization use_cpu_initialization "
    "compute_dtype upcast_lmhead_output dense_mixer llama4_linearized_experts fix_untrained_tokens gemma4_* "
    "csa_dense_mode moe_*capacity* moe_token_* moe_router_* moe_pad_* linear_decoupled_in_proj s2_attention "
    "block_diag_attn engram_tokenizer_map mlp_padding_free":
        "the model computes as its own config says",
    "tokens added_tokens_overrides resize_vocab add_tokens add_special_tokens new_special_tokens* init_special_tokens "
    "mean_resizing_embeddings split_special_tokens skip_special_tokens tokenizer_* shrink_embeddings":
        "the tokenizer is the model's own, and the vocabulary is not extended; see model.tokenizer",
    "video_* audio_* use_audio_in_video image_do_pan_and_scan crop_to_patches image_resize_algorithm":
        "images keep their shape, within vision.image_min_tokens and image_max_tokens; kubetune has no videos and no sound",
    "do_sample temperature top_k top_p num_beams repetition_penalty length_penalty max_new_tokens max_length "
    "generation_* generate_samples eval_num_beams predict_with_generate sortish_sampler gradio_* "
    "eval_max_new_tokens":
        "answers are written by `kubetune generate` and `kubetune evaluate`, and while training as evaluation says",
    "eval_on_start trainer.val_before_train":
        ("the model before training is measured in any case where evaluation.metrics has names", False),
    "compute_accuracy eval_metric eval_use_evalscope eval_dataset eval_dataset_args eval_limit "
    "eval_generation_config extra_eval_args do_bench_eval bench_* eval_causal_lm_metrics lm_eval_* "
    "eval_on_each_dataset eval_delay include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval "
    "eval_use_gather_object eval_do_concat_batches label_names":
        "see evaluation in the run file: metrics of data.eval, at training.eval_steps",
    "export_* merge_lora merge_method hatchery push_* save_compressed llmcompressor safe_serialization "
    "max_shard_size save_missing_weights":
        "`kubetune export` writes the result, whole or as an adapter",
    "hub_* hf_hub_token ms_hub_token om_hub_token use_swift_lora use_*_token":
        "a token is taken from the environment (HF_TOKEN); push says where the result goes",
    "swanlab_* comet_* trackio_* otel_* use_otel_metrics tensorboard_* ray_run_name ray_exp_name":
        "trackers are TensorBoard, MLflow, Weights & Biases and Trackio (tracking)",
    "sequence_parallel":
        (_NOT_SPLIT, False),
    "sequence_parallel_size sequence_parallel_degree context_parallel_size tensor_parallel_size expert_parallel_size "
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "dp_replicate_size":
        (_NOT_SPLIT, 1),
    "parallelism_config tensor_* pipeline_* *_pipeline_* expert_parallel_* expert_backend "
    "sequence_parallel* context_parallel* cp_* ring_attn_func heads_k_stride deepspeed_* zero_hpz_* ds3_* "
    "fsdp_* use_megatron_fsdp strict_fsdp_* data_parallel_* qlora_sharded_model_loading use_hyper_parallel "
    "hyper_parallel_args use_mca megatron_extra_kwargs microbatch_group_size_per_vp_stage device_groups "
    "deepcompile ddp ddp_* world_size":
        _NOT_SPLIT,
    "use_ray":
        (_NODES, False),
    "ray_num_workers":
        (_NODES, 1),
    "ray_kwargs.* ray_init.*":
        _OF_VERL,
    "master_addr master_port ray_* resources_per_worker device device_map max_memory gpu_memory_limit "
    "accelerator_config":
        "the launcher knows processes and devices; see compute.nodes and compute.processes",
    "use_unsloth* use_liger* liger_* *_kernel *_kernels *_fusion fp4_* fp8_* bridge_backend "
    "chunked_cross_entropy* tiled_mlp_* large_head_attention sage_attention flash_attn_* flash_optimum "
    "sdpa_varlen moe_* overlap_* align_* batch_p2p_comm tp_comm_overlap te_rng_tracker "
    "use_distributed_optimizer accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 "
    "apply_query_key_layer_scaling dsa_* use_fused_mhc mhc_* vit_* enable_npu_model_patch use_onebitllms "
    "torch_compile_options selective_checkpointing activation_checkpointing*":
        _NO_EFFECT,
    "debug profiler_* profile_* enable_torch_profiler gc_* manual_gc* include_* enable_jit_checkpoint "
    "full_determinism restore_callback_states_from_checkpoint length_column_name pad_to_multiple_of "
    "padding_side ignore_pad_token_for_loss use_kv_cache print_* ignore_args_error load_args is_preprocess "
    "total_num_tokens total_supervised_tokens dynamic_checkpoint async_save use_flash_ckpt "
    "use_persistent_ckpt_worker no_load_* dist_ckpt_* distrib_optim_* nccl_comm_warmup mcore_* "
    "skip_megatron_init use_cache":
        _NO_EFFECT,
    "actor_rollout_ref.* critic.* trainer.* algorithm.* data.* reward_model.* reward.* reward_manager.* "
    "global_profiler.* transfer_queue.* custom_reward_function.*":
        _OF_VERL,
}  # fmt: skip
